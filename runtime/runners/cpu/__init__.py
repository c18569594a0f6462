"""The CPU runner: each step is one call of a compiled library."""
