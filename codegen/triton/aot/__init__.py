"""The package that compiles Triton kernels ahead of time: sources, cubins and launch records."""
