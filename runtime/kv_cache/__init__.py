"""The bookkeeping of the paged KV cache: which block holds which tokens of which sequence."""
