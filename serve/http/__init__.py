"""The HTTP endpoint of a server."""
