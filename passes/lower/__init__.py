"""Passes that end a pipeline: they select rows, choose kernels, partition segments and plan memory."""
