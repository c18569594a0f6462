"""The table of C++ kernels for the CPU: which kernel runs which op, best first."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from inferc.codegen import conditions as shared
from inferc.codegen.cpp import conditions
from inferc.codegen.kernel import Fits, Kernel
from inferc.ir.program import argument, dtype_name

PANELS = {torch.float32: "panel16_k1", torch.bfloat16: "panel16_k2", torch.int8: "panel16_k4"}

_BIASES = ("gate_up_bias", "down_bias")
# op, name, argument whose dtype decides, weights that are packed, weights that are not, further condition
_CPP_ROWS: tuple[tuple[str, str, str, tuple[str, ...], tuple[str, ...], Callable[[fx.Node], str] | None], ...] = (
    ("aten.embedding", "embedding_panel", "weight", ("weight",), (), conditions.packed_lookup),
    ("aten.embedding", "embedding", "weight", (), ("weight",), shared.plain_lookup),
    ("aten.linear", "linear", "input", ("weight",), ("bias",), None),
    ("aten.add.Tensor", "add", "self", (), (), shared.same_shapes),
    ("aten.mul.Tensor", "mul", "self", (), (), shared.same_shapes),
    ("aten.index_select", "index_select", "self", (), (), shared.first_axis),
    ("inferc.all_reduce", "all_reduce", "x", (), (), None),
    ("inferc.all_gather", "all_gather", "x", (), (), shared.last_axis),
    ("inferc.expert_dispatch", "expert_dispatch", "x", (), ("placement",), conditions.ranks_fit),
    ("inferc.expert_combine", "expert_combine", "y", (), ("placement",), conditions.ranks_fit),
    ("inferc.head_linear", "head_linear", "x", ("weight",), (), None),
    ("inferc.resize_heads", "resize_heads", "x", (), (), None),
    ("inferc.linear_wide", "linear_wide", "x", ("weight",), (), None),
    ("inferc.linear_add", "linear_add", "x", ("weight",), ("bias",), None),
    ("inferc.linear_silu_mul", "linear_silu_mul", "x", ("weight",), ("bias",), conditions.without_scale),
    ("inferc.layer_norm", "layer_norm", "x", (), ("weight", "bias"), None),
    ("inferc.rms_norm", "rms_norm", "x", (), ("weight",), None),
    ("inferc.rms_norm_add", "rms_norm_add", "x", (), ("weight",), None),
    ("inferc.rope", "rope", "x", (), (), shared.rope_fits),
    ("inferc.silu_mul", "silu_mul", "gate", (), (), None),
    ("inferc.gelu_mul", "gelu_mul", "gate", (), (), None),
    ("inferc.moe_routing", "moe_routing", "router_logits", (), ("bias",), shared.routing_fits),
    ("inferc.moe_experts", "moe_experts", "x", ("gate_up", "down"), _BIASES, conditions.float_experts_fit),
    ("inferc.lm_head", "lm_head", "weight", ("weight",), ("bias",), None),
    ("inferc.quantize_rows", "quantize_rows", "x", (), (), None),
    ("inferc.rms_norm_quantize", "rms_norm_quantize", "x", (), ("weight",), None),
    ("inferc.rms_norm_add_quantize", "rms_norm_add_quantize", "x", (), ("weight",), None),
    ("inferc.layer_norm_quantize", "layer_norm_quantize", "x", (), ("weight", "bias"), None),
    ("inferc.silu_mul_quantize", "silu_mul_quantize", "gate", (), (), None),
)
_QKV_PLAIN = ("bias", "q_weight", "k_weight")
# Rows with the same fields, for ops that use the KV cache: each becomes two kernels, for a cache in the model's dtype
# and for one in int8.
_CACHE_ROWS: tuple[tuple[str, str, str, tuple[str, ...], tuple[str, ...], Callable[[fx.Node], str] | None], ...] = (
    ("inferc.kv_write", "kv_write", "k", (), (), None),
    ("inferc.rope_kv_write", "rope_kv_write", "q", (), (), shared.rope_fits),
    ("inferc.norm_rope_kv_write", "norm_rope_kv_write", "q", (), ("q_weight", "k_weight"), shared.rope_fits),
    (
        "inferc.qkv_rope_kv_write",
        "qkv_rope_kv_write",
        "x",
        ("weight",),
        _QKV_PLAIN,
        conditions.float_qkv_fits,
    ),
    ("inferc.paged_attention", "paged_attention", "q", (), ("sinks", "alibi"), shared.heads_fit),
    ("inferc.latent_write", "latent_write", "k", (), (), None),
    ("inferc.latent_attention", "latent_attention", "q", (), (), conditions.latents_fit),
)
_SCALES = ("gate_up_scale", "down_scale")
_GROUP_SCALES = ("gate_up_group_scale", "down_group_scale")
# Rows for integer weights, without the deciding argument: the dtypes of the first weight and of the result decide.
_INT8_ROWS: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...], Callable[[fx.Node], str] | None], ...] = (
    ("inferc.embedding_int8", "embedding_panel_int8", ("weight",), ("scale",), conditions.packed_lookup),
    ("inferc.embedding_int8", "embedding_int8", (), ("weight", "scale"), None),
    ("inferc.linear_int8", "linear_int8", ("weight",), ("scale", "bias"), None),
    ("inferc.linear_w8a8", "linear_w8a8", ("weight",), ("scale", "bias"), conditions.int32_holds),
    (
        "inferc.qkv_rope_kv_write",
        "qkv_rope_kv_write_int8",
        ("weight",),
        ("scale", *_QKV_PLAIN),
        conditions.int8_qkv_fits,
    ),
    (
        "inferc.qkv_rope_kv_write",
        "qkv_rope_kv_write_w8a8",
        ("weight",),
        ("scale", *_QKV_PLAIN),
        conditions.w8a8_qkv_fits,
    ),
    ("inferc.moe_experts", "moe_experts_int8", ("gate_up", "down"), (*_BIASES, *_SCALES), conditions.int8_experts_fit),
    ("inferc.moe_experts", "moe_experts_w8a8", ("gate_up", "down"), (*_BIASES, *_SCALES), conditions.w8a8_experts_fit),
)
# op, name, weights in four bits, their group scales, arguments that are not packed, condition
_INT4_ROWS: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...], tuple[str, ...], Callable[[fx.Node], str]], ...] = (
    ("inferc.linear_w4a8", "linear_w4a8", ("weight",), ("group_scale",), ("scale", "bias"), conditions.four_bits_fit),
    (
        "inferc.qkv_rope_kv_write",
        "qkv_rope_kv_write_w4a8",
        ("weight",),
        ("group_scale",),
        ("scale", *_QKV_PLAIN),
        conditions.w4a8_qkv_fits,
    ),
    (
        "inferc.moe_experts",
        "moe_experts_w4a8",
        ("gate_up", "down"),
        _GROUP_SCALES,
        (*_BIASES, *_SCALES),
        conditions.w4a8_experts_fit,
    ),
)


def _emits(op: str, name: str) -> str:
    """Return the path of the function that emits a kernel's call; all kernels of experts share one."""
    if op.startswith(("inferc.expert_", "inferc.moe_")):
        return f"inferc.codegen.cpp.expert_calls:{'moe_experts' if op == 'inferc.moe_experts' else name}"
    return f"inferc.codegen.cpp.calls:{name}"


def _caches(op: str) -> tuple[bool | None, ...]:
    """Return whether the KV cache is in int8: both for an op that uses the cache, None for other ops."""
    return (False, True) if op in {row[0] for row in _CACHE_ROWS} else (None,)


def _cpp_name(name: str, dtype: torch.dtype, int8_cache: bool | None) -> str:
    return f"cpp.{name}{'_int8kv' if int8_cache else ''}.{dtype_name(dtype)}"


def _cpp_kernels() -> tuple[Kernel, ...]:
    kernels = [
        Kernel(
            "cpp",
            op,
            _cpp_name(name, dtype, int8_cache),
            conditions.ForCpp(deciding, dtype, check, int8_cache),
            _emits(op, name),
            {**dict.fromkeys(packed, PANELS[dtype]), **dict.fromkeys(plain, None)},
        )
        for op, name, deciding, packed, plain, check in (*_CPP_ROWS, *_CACHE_ROWS)
        for dtype in (torch.bfloat16, torch.float32)
        for int8_cache in _caches(op)
    ]
    kernels += [
        Kernel(
            "cpp",
            op,
            _cpp_name(name, dtype, int8_cache),
            conditions.ForCppIntegers((*packed, *plain)[0], dtype, check, torch.int8, int8_cache),
            _emits(op, name),
            {**dict.fromkeys(packed, PANELS[torch.int8]), **dict.fromkeys(plain, None)},
        )
        for op, name, packed, plain, check in _INT8_ROWS
        for dtype in (torch.bfloat16, torch.float32)
        for int8_cache in _caches(op)
    ]
    kernels += [
        Kernel(
            "cpp",
            op,
            _cpp_name(name, dtype, int8_cache),
            conditions.ForCppIntegers(packed[0], dtype, check, torch.uint8, int8_cache),
            _emits(op, name),
            {
                **dict.fromkeys(packed, PANELS[torch.int8]),
                **dict.fromkeys(scales, PANELS[torch.float32]),
                **dict.fromkeys(plain, None),
            },
        )
        for op, name, packed, scales, plain, check in _INT4_ROWS
        for dtype in (torch.bfloat16, torch.float32)
        for int8_cache in _caches(op)
    ]
    kernels.append(Kernel("cpp", "aten.cat", "cpp.cat", Fits(conditions.cat_fits), "inferc.codegen.cpp.calls:cat"))
    kernels.append(
        Kernel(
            "cpp",
            "inferc.pointwise",
            "cpp.pointwise",
            Fits(conditions.pointwise_fits),
            "inferc.codegen.cpp.pointwise:pointwise",
        )
    )
    ids = conditions.ForCpp(
        "expert_ids", torch.int32, lambda node: shared.at_most("ep rank", argument(node, "rank"), 63)
    )
    positions = conditions.ForCpp("self", torch.int64, shared.first_axis)
    choose = Kernel(
        "cpp",
        "inferc.expert_choose",
        "cpp.expert_choose",
        ids,
        _emits("inferc.expert_choose", "expert_choose"),
        {"placement": None},
    )
    kernels.append(choose)
    kernels.append(
        Kernel(
            "cpp", "aten.index_select", "cpp.index_select.int64", positions, _emits("aten.index_select", "index_select")
        )
    )
    table = conditions.ForCpp("inv_freq", torch.float32)
    kernels.append(
        Kernel(
            "cpp",
            "inferc.rope_table",
            "cpp.rope_table",
            table,
            "inferc.codegen.cpp.calls:rope_table",
            {"inv_freq": None},
        )
    )
    return tuple(kernels)


KERNELS = _cpp_kernels()
