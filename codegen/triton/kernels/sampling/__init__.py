"""From logits to token ids on a GPU: processors, filters, the draw, log-probabilities.

A step's logits rows are sampled in chunks. `counts_ptr` says [tokens of the step, rows of this chunk, sequences, the
chunk's first row]; logits and scratch are indexed by row of the chunk, parameters and results by row of the step. A row
depends on nothing but its own logits, parameters and state, and comes out the same in every launch.
"""
