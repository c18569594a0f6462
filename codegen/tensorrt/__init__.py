"""Dense programs, and segments of paged ones, as TensorRT plans."""
