"""Passes that spread a program over ranks."""
