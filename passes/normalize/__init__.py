"""Passes that bring a captured program into a canonical form."""
