"""Heads that draft: small models that continue from the hidden rows of a large one, as Programs."""
