"""The KV cache's tier below the arena: what moves, and where it lies."""
