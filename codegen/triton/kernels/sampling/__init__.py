"""The kernels from logits to token ids on a GPU: logits processors, filters, the draw and log-probabilities.

A step's logits rows are sampled in chunks. `counts_ptr` has [tokens of the step, rows of this chunk, sequences, the
chunk's first row, rows of the step]. Logits and scratch are indexed by row of the chunk, parameters and results by row
of the step. The result of a row depends on nothing but its own logits, parameters and state, and is the same in every
launch.

Rows of one slot follow one another, at most 64: each but the first is that of a drafted token, which is the row's own
input, and counts only if the row before it counts and chose that token.
"""
