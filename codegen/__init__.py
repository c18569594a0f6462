"""The path from a Program to files: choosing kernels, generating code, and writing an artifact's folder."""
