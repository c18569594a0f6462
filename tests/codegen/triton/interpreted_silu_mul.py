"""Run the Triton kernel under the interpreter over a sweep, and print {case: [largest error, tolerance]} as JSON.

A process of its own: TRITON_INTERPRET=1 must be set before Triton is imported.
"""

import json
import sys

import torch

from inferc import ops as _ops  # noqa: F401  (defines torch.ops.inferc)
from inferc.codegen.triton.silu_mul import BLOCK, silu_mul_kernel

CASES = [(1, 1), (1, 96), (3, 1000), (5, 1024), (2, 1025), (7, 2500)]
# Relative, of the result's dtype: one rounding (to bfloat16 the interpreter truncates), a few in float32.
TOLERANCES = {"bfloat16": 2**-7, "float16": 2**-11, "float32": 4e-7}


def largest_error(num_tokens: int, num_columns: int, dtype: torch.dtype) -> float:
    """Largest error relative to 1 + |reference|, on the two halves of a packed projection."""
    generator = torch.Generator().manual_seed(num_tokens * 10000 + num_columns)
    packed = (torch.randn(num_tokens, 2 * num_columns, generator=generator) * 4).to(dtype)
    gate, up = packed[:, :num_columns], packed[:, num_columns:]
    out = torch.full((num_tokens, num_columns), float("nan"), dtype=dtype)
    grid = (num_tokens, -(-num_columns // BLOCK), 1)
    silu_mul_kernel[grid](gate, up, out, num_columns, gate.stride(0), up.stride(0), out.stride(0), BLOCK=BLOCK)
    reference = torch.ops.inferc.silu_mul(gate, up).double()
    return float(((out.double() - reference).abs() / (1 + reference.abs())).max())


if __name__ == "__main__":
    results = {
        f"{name} {tokens}x{columns}": [largest_error(tokens, columns, getattr(torch, name)), tolerance]
        for name, tolerance in TOLERANCES.items()
        for tokens, columns in CASES
    }
    json.dump(results, sys.stdout)
