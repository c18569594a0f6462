"""The code generator that writes a dense program as an ONNX model."""
