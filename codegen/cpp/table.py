"""The table of C++ kernels for the CPU: which kernel runs which op, best first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import fx

from inferc.codegen import conditions as shared
from inferc.codegen.cpp import conditions
from inferc.codegen.kernel import Fits, Kernel
from inferc.ir.program import argument, dtype_name
from inferc.targets import Target

DTYPES = (torch.bfloat16, torch.float32)
PANELS = {torch.float32: "panel16_k1", torch.bfloat16: "panel16_k2", torch.int8: "panel16_k4"}

_BIASES = ("gate_up_bias", "down_bias")
# op, call, argument whose dtype decides, weights that are packed, weights that are not, further condition
_CPP_ROWS: tuple[tuple[str, str, str, tuple[str, ...], tuple[str, ...], Callable[[fx.Node], str] | None], ...] = (
    ("aten.embedding", "elementwise:embedding_panel", "weight", ("weight",), (), conditions.packed_lookup),
    ("aten.embedding", "elementwise:embedding", "weight", (), ("weight",), shared.plain_lookup),
    ("aten.linear", "matmul:linear", "input", ("weight",), ("bias",), None),
    ("aten.add.Tensor", "elementwise:add", "self", (), (), shared.same_shapes),
    ("aten.mul.Tensor", "elementwise:mul", "self", (), (), shared.same_shapes),
    ("aten.index_select", "elementwise:index_select", "self", (), (), shared.first_axis),
    ("inferc.all_reduce", "ranks:all_reduce", "x", (), (), None),
    ("inferc.all_gather", "ranks:all_gather", "x", (), (), shared.last_axis),
    ("inferc.expert_dispatch", "moe:expert_dispatch", "x", (), ("placement",), conditions.ranks_fit),
    ("inferc.expert_combine", "moe:expert_combine", "y", (), ("placement",), conditions.ranks_fit),
    ("inferc.head_linear", "matmul:head_linear", "x", ("weight",), (), None),
    ("inferc.resize_heads", "elementwise:resize_heads", "x", (), (), None),
    ("inferc.linear_wide", "matmul:linear_wide", "x", ("weight",), (), None),
    ("inferc.linear_add", "matmul:linear_add", "x", ("weight",), ("bias",), None),
    ("inferc.linear_silu_mul", "matmul:linear_silu_mul", "x", ("weight",), ("bias",), conditions.without_scale),
    ("inferc.layer_norm", "norms:layer_norm", "x", (), ("weight", "bias"), None),
    ("inferc.rms_norm", "norms:rms_norm", "x", (), ("weight",), None),
    ("inferc.rms_norm_add", "norms:rms_norm_add", "x", (), ("weight",), None),
    ("inferc.rope", "attention:rope", "x", (), (), shared.rope_fits),
    ("inferc.silu_mul", "elementwise:silu_mul", "gate", (), (), None),
    ("inferc.gelu_mul", "elementwise:gelu_mul", "gate", (), (), None),
    ("inferc.moe_routing", "moe:moe_routing", "router_logits", (), ("bias",), shared.routing_fits),
    ("inferc.moe_experts", "moe:moe_experts", "x", ("gate_up", "down"), _BIASES, conditions.float_experts_fit),
    ("inferc.lm_head", "matmul:lm_head", "weight", ("weight",), ("bias",), None),
    ("inferc.lora_shrink", "lora:lora_shrink", "adapters", (), (), shared.adapters_fit),
    ("inferc.lora_lookup", "lora:lora_lookup", "adapters", (), (), None),
    ("inferc.lora_expand", "lora:lora_expand", "adapters", (), (), None),
    ("inferc.quantize_rows", "norms:quantize_rows", "x", (), (), None),
    ("inferc.rms_norm_quantize", "norms:rms_norm_quantize", "x", (), ("weight",), None),
    ("inferc.rms_norm_add_quantize", "norms:rms_norm_add_quantize", "x", (), ("weight",), None),
    ("inferc.layer_norm_quantize", "norms:layer_norm_quantize", "x", (), ("weight", "bias"), None),
    ("inferc.silu_mul_quantize", "norms:silu_mul_quantize", "gate", (), (), None),
)
_QKV_PLAIN = ("bias", "q_weight", "k_weight")
# Rows with the same fields, for ops that use the KV cache: each becomes two kernels, for a cache in the model's dtype
# and for one in int8.
_CACHE_ROWS: tuple[tuple[str, str, str, tuple[str, ...], tuple[str, ...], Callable[[fx.Node], str] | None], ...] = (
    ("inferc.kv_write", "attention:kv_write", "k", (), (), None),
    ("inferc.rope_kv_write", "attention:rope_kv_write", "q", (), (), shared.rope_fits),
    ("inferc.norm_rope_kv_write", "attention:norm_rope_kv_write", "q", (), ("q_weight", "k_weight"), shared.rope_fits),
    (
        "inferc.qkv_rope_kv_write",
        "attention:qkv_rope_kv_write",
        "x",
        ("weight",),
        _QKV_PLAIN,
        conditions.float_qkv_fits,
    ),
    ("inferc.paged_attention", "attention:paged_attention", "q", (), ("sinks", "alibi"), shared.heads_fit),
    ("inferc.latent_write", "attention:latent_write", "k", (), (), None),
    ("inferc.latent_attention", "attention:latent_attention", "q", (), (), conditions.latents_fit),
)
_SCALES = ("gate_up_scale", "down_scale")
_GROUP_SCALES = ("gate_up_group_scale", "down_group_scale")
# Rows for integer weights, without the deciding argument: the dtypes of the first weight and of the result decide.
_INT8_ROWS: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...], Callable[[fx.Node], str] | None], ...] = (
    ("inferc.embedding_int8", "elementwise:embedding_panel_int8", ("weight",), ("scale",), conditions.packed_lookup),
    ("inferc.embedding_int8", "elementwise:embedding_int8", (), ("weight", "scale"), None),
    ("inferc.linear_int8", "matmul:linear_int8", ("weight",), ("scale", "bias"), None),
    ("inferc.linear_w8a8", "matmul:linear_w8a8", ("weight",), ("scale", "bias"), conditions.int32_holds),
    (
        "inferc.qkv_rope_kv_write",
        "attention:qkv_rope_kv_write_int8",
        ("weight",),
        ("scale", *_QKV_PLAIN),
        conditions.int8_qkv_fits,
    ),
    (
        "inferc.qkv_rope_kv_write",
        "attention:qkv_rope_kv_write_w8a8",
        ("weight",),
        ("scale", *_QKV_PLAIN),
        conditions.w8a8_qkv_fits,
    ),
    (
        "inferc.moe_experts",
        "moe:moe_experts_int8",
        ("gate_up", "down"),
        (*_BIASES, *_SCALES),
        conditions.int8_experts_fit,
    ),
    (
        "inferc.moe_experts",
        "moe:moe_experts_w8a8",
        ("gate_up", "down"),
        (*_BIASES, *_SCALES),
        conditions.w8a8_experts_fit,
    ),
)
# op, call, weights in four bits, their group scales, arguments that are not packed, condition
_INT4_ROWS: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...], tuple[str, ...], Callable[[fx.Node], str]], ...] = (
    (
        "inferc.linear_w4a8",
        "matmul:linear_w4a8",
        ("weight",),
        ("group_scale",),
        ("scale", "bias"),
        conditions.four_bits_fit,
    ),
    (
        "inferc.qkv_rope_kv_write",
        "attention:qkv_rope_kv_write_w4a8",
        ("weight",),
        ("group_scale",),
        ("scale", *_QKV_PLAIN),
        conditions.w4a8_qkv_fits,
    ),
    (
        "inferc.moe_experts",
        "moe:moe_experts_w4a8",
        ("gate_up", "down"),
        _GROUP_SCALES,
        (*_BIASES, *_SCALES),
        conditions.w4a8_experts_fit,
    ),
)


def _emits(call: str) -> str:
    """Return the path of the function that emits the call of a kernel, which is "module:name" of codegen/cpp/calls/.

    All kernels of experts share one function.
    """
    module, _, name = call.partition(":")
    return f"inferc.codegen.cpp.calls.{module}:{'moe_experts' if name.startswith('moe_experts') else name}"


def _caches(op: str) -> tuple[bool | None, ...]:
    """Return whether the KV cache is in int8: both for an op that uses the cache, None for other ops."""
    return (False, True) if op in {row[0] for row in _CACHE_ROWS} else (None,)


def _cpp_name(call: str, dtype: torch.dtype, int8_cache: bool | None) -> str:
    return f"cpp.{call.partition(':')[2]}{'_int8kv' if int8_cache else ''}.{dtype_name(dtype)}"


def _float_kernels() -> Iterator[Kernel]:
    for op, call, deciding, packed, plain, check in (*_CPP_ROWS, *_CACHE_ROWS):
        for dtype, int8_cache in product(DTYPES, _caches(op)):
            yield Kernel(
                "cpp",
                op,
                _cpp_name(call, dtype, int8_cache),
                conditions.ForCpp(deciding, dtype, check, int8_cache),
                _emits(call),
                {**dict.fromkeys(packed, PANELS[dtype]), **dict.fromkeys(plain, None)},
            )


def _int8_kernels() -> Iterator[Kernel]:
    for op, call, packed, plain, check in _INT8_ROWS:
        for dtype, int8_cache in product(DTYPES, _caches(op)):
            yield Kernel(
                "cpp",
                op,
                _cpp_name(call, dtype, int8_cache),
                conditions.ForCppIntegers((*packed, *plain)[0], dtype, check, torch.int8, int8_cache),
                _emits(call),
                {**dict.fromkeys(packed, PANELS[torch.int8]), **dict.fromkeys(plain, None)},
            )


def _int4_kernels() -> Iterator[Kernel]:
    for op, call, packed, scales, plain, check in _INT4_ROWS:
        layouts = {**dict.fromkeys(packed, PANELS[torch.int8]), **dict.fromkeys(scales, PANELS[torch.float32])}
        for dtype, int8_cache in product(DTYPES, _caches(op)):
            yield Kernel(
                "cpp",
                op,
                _cpp_name(call, dtype, int8_cache),
                conditions.ForCppIntegers(packed[0], dtype, check, torch.uint8, int8_cache),
                _emits(call),
                {**layouts, **dict.fromkeys(plain, None)},
            )


def _other_kernels() -> Iterator[Kernel]:
    """Yield the kernels whose dtypes are not the model's."""

    def row(op: str, call: str, why_not: Callable[[fx.Node, Target], str], weight: str = "", kind: str = "") -> Kernel:
        name = f"cpp.{call.partition(':')[2]}{kind}"
        return Kernel("cpp", op, name, why_not, _emits(call), dict.fromkeys((weight,) if weight else (), None))

    few_ranks = conditions.ForCpp(
        "expert_ids", torch.int32, lambda node: shared.at_most("ep rank", argument(node, "rank"), 63)
    )
    yield row("aten.cat", "elementwise:cat", Fits(conditions.cat_fits))
    yield row("inferc.pointwise", "pointwise:pointwise", Fits(conditions.pointwise_fits))
    yield row("inferc.expert_choose", "moe:expert_choose", few_ranks, "placement")
    positions = conditions.ForCpp("self", torch.int64, shared.first_axis)
    yield row("aten.index_select", "elementwise:index_select", positions, kind=".int64")
    yield row("inferc.rope_table", "attention:rope_table", conditions.ForCpp("inv_freq", torch.float32), "inv_freq")


KERNELS = (*_float_kernels(), *_int8_kernels(), *_int4_kernels(), *_other_kernels())
