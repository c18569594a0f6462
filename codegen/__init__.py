"""Program to files: kernels chosen, code written, an artifact's folder."""
