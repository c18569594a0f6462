"""Passes that make one op of several, a fusion a module."""
