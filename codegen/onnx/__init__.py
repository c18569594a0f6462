"""A dense program as an ONNX model."""
