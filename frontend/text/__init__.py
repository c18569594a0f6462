"""The text side of a checkpoint: tokenizer, chat template, generation defaults."""
