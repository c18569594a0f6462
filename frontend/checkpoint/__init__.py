"""The reading of a Hugging Face folder: its config, its tensors, and messages about what cannot be read."""
