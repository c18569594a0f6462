"""Passes that store weights, activation rows and the KV cache in 8 or 4 bits."""
