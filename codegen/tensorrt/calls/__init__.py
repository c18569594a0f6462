"""The TensorRT layers of each node, a module for each family of ops.

The arithmetic is that of the references: norms, activations, rope and ops that are defined in float32 are computed in
float32 and rounded once; products take and give the model's dtype.
"""
