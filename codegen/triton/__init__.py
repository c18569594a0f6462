"""The package that turns a step into launches of Triton kernels on a GPU."""
