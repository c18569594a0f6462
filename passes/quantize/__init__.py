"""Passes that store weights, rows and the KV cache in few bits."""
