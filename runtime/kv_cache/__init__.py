"""Which block of the KV cache holds what."""
