"""The cost model: what a program moves and computes, and what devices can do."""
