"""The Triton kernels, one module per kind."""
