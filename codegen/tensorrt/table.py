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
    ("aten.embedding", "calls:embedding", Fits(shared.plain_lookup)),
    ("aten.linear", "calls:linear", Fits()),
    ("aten.add.Tensor", "calls:add", Fits()),
    ("aten.mul.Tensor", "calls:mul", Fits()),
    ("aten.cat", "calls:cat", Fits()),
    ("aten.index_select", "calls:index_select", Fits()),
    ("inferc.head_linear", "calls:head_linear", Fits()),
    ("inferc.linear_wide", "calls:linear_wide", Fits()),
    ("inferc.lm_head", "calls:lm_head", Fits()),
    ("inferc.layer_norm", "calls:layer_norm", Fits()),
    ("inferc.rms_norm", "calls:rms_norm", Fits()),
    ("inferc.rope_table", "calls:rope_table", Fits()),
    ("inferc.rope", "calls:rope", Fits()),
    ("inferc.silu_mul", "calls:silu_mul", Fits()),
    ("inferc.gelu_mul", "calls:gelu_mul", Fits()),
    ("inferc.pointwise", "calls:pointwise", Fits(shared.broadcasts)),
    ("inferc.dense_write", "attention_calls:dense_write", Fits()),
    ("inferc.dense_attention", "attention_calls:dense_attention", Fits(conditions.fuses_attention)),
    ("inferc.dense_attention", "attention_calls:spelled_attention", Fits()),
    ("inferc.dense_latent_attention", "attention_calls:spelled_latent_attention", Fits()),
    ("inferc.moe_routing", "expert_calls:moe_routing", Fits(shared.is_common_score)),
    ("inferc.moe_experts", "expert_calls:all_experts", Fits(conditions.experts_fit)),
    ("inferc.linear_int8", "calls:linear_int8", Fits()),
    ("inferc.embedding_int8", "calls:embedding_int8", Fits(conditions.packed_lookup)),
    ("inferc.quantize_rows", "rounded_calls:quantize_rows", Fits()),
    ("inferc.linear_w8a8", "rounded_calls:linear_w8a8", Fits()),
    ("inferc.quantize_rows_fp8", "rounded_calls:quantize_rows_fp8", conditions.fp8_fits),
    ("inferc.linear_fp8", "rounded_calls:linear_fp8", conditions.fp8_fits),
)

KERNELS = tuple(
    Kernel("tensorrt", op, f"tensorrt.{call.partition(':')[2]}", why_not, f"inferc.codegen.tensorrt.{call}")
    for op, call, why_not in _ROWS
)
