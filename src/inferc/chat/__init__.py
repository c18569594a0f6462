"""The forms that a chat template has: of the messages that it reads, and of the calls of tools that it writes."""
