"""The calls of the C++ kernels, a module for each family of ops: the `emit` functions of the kernel table."""
