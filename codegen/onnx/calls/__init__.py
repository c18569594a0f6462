"""The ONNX ops of each node, a module for each family of ops: the `emit` functions of the kernel table."""
