"""The runners over a dense KV cache, by onnxruntime and TensorRT."""
