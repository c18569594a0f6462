"""The code generator that builds TensorRT plans of dense programs and of segments of paged programs."""
