"""What each target is while a model is compiled for it: its checks, its pipeline, its kernels, its files."""
