"""The requests and responses of OpenAI's interface, independent of their transport."""
