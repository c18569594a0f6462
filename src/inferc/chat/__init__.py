"""The forms that a chat template has: of the messages that it reads, of the calls and the reasoning that it writes."""
