"""The backend of each target while a model is compiled for it: its checks, its pipeline, its kernels, its files."""
