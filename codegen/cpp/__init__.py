"""The step in C++ for the CPU, and its kernels."""
