"""The offload tier of the KV cache, below the arena: which blocks move to it, and where they are stored."""
