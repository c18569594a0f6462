"""Passes that end a pipeline: rows, kernels, segments, memory."""
