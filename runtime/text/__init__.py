"""The conversion of text to token ids and back, and of conversations to text."""
