"""A Hugging Face folder: its config, its tensors, and what cannot be read."""
