"""The compiler: from a Hugging Face model to an artifact, and the commands that judge an artifact."""
