"""Text to ids and back, and conversations to text."""
