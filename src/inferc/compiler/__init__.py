"""From a Hugging Face model to an artifact, and the judges of what came of it."""
