"""Rewrite a Program step by step: which passes run, in which order, and what holds after each of them."""
