"""Steps as one call of a compiled library."""
