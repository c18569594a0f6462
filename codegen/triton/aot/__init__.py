"""Triton kernels compiled ahead of time: sources, cubins, launch records."""
