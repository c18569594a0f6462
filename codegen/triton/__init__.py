"""The step as launches of Triton kernels on a GPU."""
