"""Steps as launches on an NVIDIA GPU, by its driver's API."""
