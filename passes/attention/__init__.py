"""Passes that decide how attention finds its keys and values."""
