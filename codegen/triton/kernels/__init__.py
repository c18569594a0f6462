"""The Triton kernels, a module a kind."""
