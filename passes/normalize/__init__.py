"""Passes that bring a captured program into one spelling."""
