"""Hugging Face ends here: a model folder becomes a Program."""
