"""The CUDA runner: steps as kernel launches on an NVIDIA GPU, through the driver's API."""
