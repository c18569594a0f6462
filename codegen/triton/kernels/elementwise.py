"""The functions of float32 that activations are made of and that Triton does not have."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):  # type: ignore[no-untyped-def]
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x):  # type: ignore[no-untyped-def]
    return x / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):  # type: ignore[no-untyped-def]
    """Compute tanh by one exponential, or by its series near 0, where the exponential would lose digits."""
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    square = x * x
    near = x * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0.0, -far, far))


@triton.jit
def gelu(x):  # type: ignore[no-untyped-def]
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_tanh(x):  # type: ignore[no-untyped-def]
    """Compute GELU by tanh(z) = 2 sigmoid(2 z) - 1, whose cancellation the factor x hides."""
    return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit  # type: ignore[untyped-decorator]
def activated(gate, up, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Combine gate and up as experts do; ACTIVATION is the index in `ops.experts.ACTIVATIONS`."""
    if ACTIVATION == 0:
        out = silu(gate) * up
    elif ACTIVATION == 1:
        out = gelu(gate) * up
    elif ACTIVATION == 2:
        out = gelu_tanh(gate) * up
    else:
        gate, up = tl.minimum(gate, LIMIT), tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        out = gate * sigmoid(gate * ALPHA) * (up + 1.0)
    return out
