"""The requests and answers of Anthropic's Messages API, independent of their transport."""
