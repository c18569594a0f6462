"""The table of TensorRT kernels: how each op becomes layers, best first."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from inferc.codegen import conditions as shared
from inferc.codegen.kernel import Fits, Kernel
from inferc.codegen.tensorrt import conditions
from inferc.targets import Target

# op, name of the call, condition
_ROWS: tuple[tuple[str, str, Callable[[fx.Node, Target], str]], ...] = (
    ("aten.embedding", "elementwise:embedding", Fits(shared.plain_lookup)),
    ("aten.linear", "matmul:linear", Fits()),
    ("aten.add.Tensor", "elementwise:add", Fits()),
    ("aten.mul.Tensor", "elementwise:mul", Fits()),
    ("aten.cat", "elementwise:cat", Fits()),
    ("aten.index_select", "elementwise:index_select", Fits()),
    ("inferc.head_linear", "matmul:head_linear", Fits()),
    ("inferc.linear_wide", "matmul:linear_wide", Fits()),
    ("inferc.lm_head", "matmul:lm_head", Fits()),
    ("inferc.layer_norm", "norms:layer_norm", Fits()),
    ("inferc.rms_norm", "norms:rms_norm", Fits()),
    ("inferc.rope_table", "attention:rope_table", Fits()),
    ("inferc.rope", "attention:rope", Fits()),
    ("inferc.silu_mul", "elementwise:silu_mul", Fits()),
    ("inferc.gelu_mul", "elementwise:gelu_mul", Fits()),
    ("inferc.pointwise", "elementwise:pointwise", Fits(shared.broadcasts)),
    ("inferc.dense_write", "attention:dense_write", Fits()),
    ("inferc.dense_attention", "attention:dense_attention", Fits(conditions.fuses_attention)),
    ("inferc.dense_attention", "attention:spelled_attention", Fits()),
    ("inferc.dense_latent_attention", "attention:spelled_latent_attention", Fits()),
    ("inferc.moe_routing", "moe:moe_routing", Fits(shared.is_common_score)),
    ("inferc.moe_experts", "moe:all_experts", Fits(conditions.experts_fit)),
    ("inferc.linear_int8", "matmul:linear_int8", Fits()),
    ("inferc.embedding_int8", "elementwise:embedding_int8", Fits(conditions.packed_lookup)),
    ("inferc.quantize_rows", "quantized:quantize_rows", Fits()),
    ("inferc.linear_w8a8", "quantized:linear_w8a8", Fits()),
    ("inferc.quantize_rows_fp8", "quantized:quantize_rows_fp8", conditions.fp8_fits),
    ("inferc.linear_fp8", "quantized:linear_fp8", conditions.fp8_fits),
)

KERNELS = tuple(
    Kernel("tensorrt", op, f"tensorrt.{call.partition(':')[2]}", why_not, f"inferc.codegen.tensorrt.calls.{call}")
    for op, call, why_not in _ROWS
)
