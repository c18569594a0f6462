"""Passes that decide how attention finds its keys and values: latents, heads, and the layout of the KV cache."""
