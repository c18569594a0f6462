"""Fuse a norm with the quantization of its rows into one op.

The op returns int8 rows, their scales and, with a residual, the sum. Each fusion saves one write and one read of a
[num_tokens, hidden_size] activation, and the following products read a quarter of the bytes of a float32 activation. A
norm that has other readers stays apart: its result must be written anyway.
"""

from __future__ import annotations

import operator

from torch import Tensor, ops

from inferc.passes.rewrite import Rewrite

inferc = ops.inferc
Two = tuple[Tensor, Tensor]
Three = tuple[Tensor, Tensor, Tensor]


def quantized(x: Tensor) -> Two:
    both = inferc.quantize_rows.default(x)
    return operator.getitem(both, 0), operator.getitem(both, 1)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, round_before_scale: bool) -> Two:
    return quantized(inferc.rms_norm.default(x, weight, eps, weight_offset, round_before_scale))


def rms_norm_fused(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, round_before_scale: bool) -> Two:
    both = inferc.rms_norm_quantize.default(x, weight, eps, weight_offset, round_before_scale)
    return operator.getitem(both, 0), operator.getitem(both, 1)


def rms_norm_add(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float, round_before_scale: bool
) -> Three:
    both = inferc.rms_norm_add.default(x, residual, weight, eps, weight_offset, round_before_scale)
    # Traced first, because matching starts at the last output in graph order and finds the other outputs from there.
    total = operator.getitem(both, 1)
    return *quantized(operator.getitem(both, 0)), total


def rms_norm_add_fused(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float, round_before_scale: bool
) -> Three:
    all_of_it = inferc.rms_norm_add_quantize.default(x, residual, weight, eps, weight_offset, round_before_scale)
    return operator.getitem(all_of_it, 0), operator.getitem(all_of_it, 1), operator.getitem(all_of_it, 2)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Two:
    return quantized(inferc.layer_norm.default(x, weight, bias, eps))


def layer_norm_fused(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Two:
    both = inferc.layer_norm_quantize.default(x, weight, bias, eps)
    return operator.getitem(both, 0), operator.getitem(both, 1)


def check_rows(x: Tensor) -> str | None:
    return None if x.dim() == 2 else f"the norm is of {list(x.shape)}, expected rows"


def check_one_weight(x: Tensor, weight: Tensor | None) -> str | None:
    if weight is not None and list(weight.shape) != [x.shape[-1]]:
        return f"the weight has shape {list(weight.shape)}, the rows have {x.shape[-1]} elements"
    return None


fuse_rms_norm_quantize = Rewrite("fuse_rms_norm_quantize", rms_norm, rms_norm_fused, (check_rows,))
fuse_rms_norm_add_quantize = Rewrite("fuse_rms_norm_add_quantize", rms_norm_add, rms_norm_add_fused, (check_rows,))
fuse_layer_norm_quantize = Rewrite(
    "fuse_layer_norm_quantize", layer_norm, layer_norm_fused, (check_rows, check_one_weight)
)
