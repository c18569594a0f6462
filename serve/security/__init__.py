"""The access control of a server: API keys, limits and TLS."""
