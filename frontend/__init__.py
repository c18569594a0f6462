"""The frontend: it turns a Hugging Face model folder into a Program, and no later stage knows Hugging Face."""
