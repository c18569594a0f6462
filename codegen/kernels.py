"""Which kernel runs which op on which target: an explicit table, best first.

Selection happens at compile time and reads dtypes, shapes and the target only; the chosen kernel's name is stored in
the node and in the artifact. A new backend is new rows and files here, not edits to passes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from inferc.codegen import conditions
from inferc.codegen.conditions import OTHER_CASE, OTHER_TARGET
from inferc.codegen.target import Target
from inferc.errors import UnsupportedError
from inferc.ir.program import argument, dtype_name, name_of, target_name

__all__ = ["ALIAS_OPS", "KERNELS", "OTHER_CASE", "OTHER_TARGET", "PANELS", "Kernel"]
__all__ += ["cannot_run", "chosen_kernel", "kernel_named", "needs_kernel", "select"]

# Views: they have no kernel, only another address or row stride of what they read.
ALIAS_OPS = ("aten.slice.Tensor", "aten.view", "getitem")


@dataclass(frozen=True)
class Kernel:
    """One implementation of one op. `emit` is "module:function", imported only when code is made, or the function.

    why_not: a reason for people why it cannot run a node on a target ("head_dim 24: expected a multiple of 16"), ""
    where it can, OTHER_TARGET or OTHER_CASE where it was never meant to.
    weight_layouts: for each argument that reads a weight, the physical layout (inferc.ir.weights.LAYOUTS) in which the
    kernel wants it, or None for row-major.
    """

    backend: str
    op: str  # as target_name prints it
    name: str
    why_not: Callable[[fx.Node, Target], str]
    emit: str | Callable[..., Any] = ""
    weight_layouts: Mapping[str, str | None] = field(default_factory=dict)

    def supports(self, node: fx.Node, target: Target) -> bool:
        """Whether it can run `node` on `target`."""
        return not self.why_not(node, target)

    def load_emit(self) -> Callable[..., Any]:
        """The function that makes the call of this kernel: as text (cpp) or as a launch (triton)."""
        if callable(self.emit):
            return self.emit
        module, _, name = self.emit.partition(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return function


PANELS = {torch.float32: "panel16_k1", torch.bfloat16: "panel16_k2", torch.int8: "panel16_k4"}

_BIASES = ("gate_up_bias", "down_bias")
# op, name, argument whose dtype decides, weights that are packed, weights that are not, further condition
_CPP_ROWS: tuple[tuple[str, str, str, tuple[str, ...], tuple[str, ...], Callable[[fx.Node], str] | None], ...] = (
    ("aten.embedding", "embedding_panel", "weight", ("weight",), (), conditions.packed_lookup),
    ("aten.embedding", "embedding", "weight", (), ("weight",), conditions.plain_lookup),
    ("aten.linear", "linear", "input", ("weight",), ("bias",), None),
    ("aten.add.Tensor", "add", "self", (), (), conditions.same_shapes),
    ("aten.mul.Tensor", "mul", "self", (), (), conditions.same_shapes),
    ("aten.index_select", "index_select", "self", (), (), conditions.first_axis),
    ("inferc.all_reduce", "all_reduce", "x", (), (), None),
    ("inferc.all_gather", "all_gather", "x", (), (), conditions.last_axis),
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
    ("inferc.rope", "rope", "x", (), (), conditions.rope_fits),
    ("inferc.silu_mul", "silu_mul", "gate", (), (), None),
    ("inferc.gelu_mul", "gelu_mul", "gate", (), (), None),
    ("inferc.moe_routing", "moe_routing", "router_logits", (), ("bias",), conditions.routing_fits),
    ("inferc.moe_experts", "moe_experts", "x", ("gate_up", "down"), _BIASES, conditions.float_experts_fit),
    ("inferc.lm_head", "lm_head", "weight", ("weight",), ("bias",), None),
    ("inferc.quantize_rows", "quantize_rows", "x", (), (), None),
    ("inferc.rms_norm_quantize", "rms_norm_quantize", "x", (), ("weight",), None),
    ("inferc.rms_norm_add_quantize", "rms_norm_add_quantize", "x", (), ("weight",), None),
    ("inferc.layer_norm_quantize", "layer_norm_quantize", "x", (), ("weight", "bias"), None),
    ("inferc.silu_mul_quantize", "silu_mul_quantize", "gate", (), (), None),
)
_QKV_PLAIN = ("bias", "q_weight", "k_weight")
# The same of what uses the KV cache: each for one in the model's dtype and for one in int8.
_CACHE_ROWS: tuple[tuple[str, str, str, tuple[str, ...], tuple[str, ...], Callable[[fx.Node], str] | None], ...] = (
    ("inferc.kv_write", "kv_write", "k", (), (), None),
    ("inferc.rope_kv_write", "rope_kv_write", "q", (), (), conditions.rope_fits),
    ("inferc.norm_rope_kv_write", "norm_rope_kv_write", "q", (), ("q_weight", "k_weight"), conditions.rope_fits),
    (
        *("inferc.qkv_rope_kv_write", "qkv_rope_kv_write", "x", ("weight",)),
        *(_QKV_PLAIN, conditions.float_qkv_fits),
    ),
    ("inferc.paged_attention", "paged_attention", "q", (), ("sinks", "alibi"), conditions.heads_fit),
    ("inferc.latent_write", "latent_write", "k", (), (), None),
    ("inferc.latent_attention", "latent_attention", "q", (), (), conditions.latents_fit),
)
_SCALES = ("gate_up_scale", "down_scale")
_GROUP_SCALES = ("gate_up_group_scale", "down_group_scale")
# The same with int8 weights, without the argument: the dtype of the first weight decides, and the result's.
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
# op, name, weights in four bits, the scales of their groups, what is not packed, condition
_INT4_ROWS: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...], tuple[str, ...], Callable[[fx.Node], str]], ...] = (
    ("inferc.linear_w4a8", "linear_w4a8", ("weight",), ("group_scale",), ("scale", "bias"), conditions.four_bits_fit),
    (
        *("inferc.qkv_rope_kv_write", "qkv_rope_kv_write_w4a8", ("weight",), ("group_scale",)),
        *(("scale", *_QKV_PLAIN), conditions.w4a8_qkv_fits),
    ),
    (
        *("inferc.moe_experts", "moe_experts_w4a8", ("gate_up", "down"), _GROUP_SCALES, (*_BIASES, *_SCALES)),
        conditions.w4a8_experts_fit,
    ),
)


def _emits(op: str, name: str) -> str:
    """Where the call of a kernel is made; that of all kernels of experts is one, with other types."""
    if op.startswith(("inferc.expert_", "inferc.moe_")):
        return f"inferc.codegen.cpp.expert_calls:{'moe_experts' if op == 'inferc.moe_experts' else name}"
    return f"inferc.codegen.cpp.calls:{name}"


def _caches(op: str) -> tuple[bool | None, ...]:
    """Whether the KV cache is in int8: both for what uses it."""
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
    kernels.append(Kernel("cpp", "aten.cat", "cpp.cat", conditions.cat_fits, "inferc.codegen.cpp.calls:cat"))
    kernels.append(
        Kernel(
            "cpp",
            "inferc.pointwise",
            "cpp.pointwise",
            conditions.pointwise_fits,
            "inferc.codegen.cpp.pointwise:pointwise",
        )
    )
    ids = conditions.ForCpp(
        "expert_ids", torch.int32, lambda node: conditions.at_most("ep rank", argument(node, "rank"), 63)
    )
    positions = conditions.ForCpp("self", torch.int64, conditions.first_axis)
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


# op, name of the kernel and of its call, argument whose dtype decides, weights, condition
_TRITON_ROWS: tuple[tuple[str, str, str, tuple[str, ...], Callable[[fx.Node], str] | None], ...] = (
    ("aten.embedding", "embedding", "weight", ("weight",), conditions.plain_lookup),
    ("aten.index_select", "index_select", "self", (), conditions.first_axis),
    ("inferc.rms_norm", "rms_norm_", "x", ("weight",), conditions.one_row_each),
    ("inferc.rms_norm_add", "rms_norm_add", "x", ("weight",), conditions.one_row_each),
    ("inferc.silu_mul", "silu_mul_", "gate", (), None),
    ("inferc.rope_table", "rope_table", "inv_freq", ("inv_freq",), None),
)
_TRITON_CACHE_ROWS: tuple[tuple[str, str, str, tuple[str, ...], Callable[[fx.Node], str] | None], ...] = (
    ("inferc.rope_kv_write", "rope_kv_write", "q", (), conditions.rope_fits),
    ("inferc.norm_rope_kv_write", "norm_rope_kv_write", "q", ("q_weight", "k_weight"), conditions.rope_fits),
    ("inferc.paged_attention", "paged_attention_", "q", ("sinks", "alibi"), conditions.heads_fit),
)
# Besides a dense Llama's: the same, with where the call is made, and whether weights have dtypes of their own.
_TRITON_MORE_ROWS: tuple[tuple[str, str, str, tuple[str, ...], Callable[[fx.Node], str] | None, bool], ...] = (
    (
        *("aten.embedding", "more_calls:embedding_by_position", "weight", ("weight",)),
        *(conditions.lookup_by_position, False),
    ),
    ("aten.linear", "product_calls:linear_", "input", ("weight", "bias"), None, False),
    ("inferc.linear_wide", "product_calls:linear_wide", "x", ("weight",), None, False),
    ("inferc.linear_add", "product_calls:linear_add", "x", ("weight", "bias"), None, False),
    ("inferc.lm_head", "product_calls:lm_head", "hidden", ("weight", "bias"), None, False),
    (
        *("inferc.linear_silu_mul", "product_calls:linear_silu_mul_", "x", ("weight", "scale", "bias")),
        *(conditions.triton_gated_fits, True),
    ),
    ("inferc.linear_int8", "product_calls:linear_int8", "x", ("weight", "scale", "bias"), None, True),
    (
        *("inferc.qkv_rope_kv_write", "product_calls:qkv_rope_kv_write_", "x"),
        *(("weight", "scale", "bias", "q_weight", "k_weight"), conditions.triton_qkv_fits, True),
    ),
    ("aten.add.Tensor", "more_calls:add", "self", (), conditions.same_shapes, False),
    ("aten.mul.Tensor", "more_calls:mul", "self", (), conditions.same_shapes, False),
    ("inferc.gelu_mul", "more_calls:gelu_mul", "gate", (), None, False),
    ("inferc.layer_norm", "more_calls:layer_norm_", "x", ("weight", "bias"), None, False),
    ("inferc.rms_norm", "more_calls:rms_norm_heads", "x", ("weight",), conditions.heads_of_rows, False),
    ("inferc.rms_norm_add", "more_calls:rms_norm_of_sum", "x", ("weight",), conditions.sum_is_unread, False),
    ("inferc.rope", "more_calls:rope", "x", (), conditions.rope_fits, False),
    ("inferc.resize_heads", "more_calls:resize_heads", "x", (), None, False),
    ("inferc.embedding_int8", "more_calls:embedding_int8_", "scale", ("weight", "scale"), None, True),
    (
        "inferc.moe_routing",
        "expert_calls:moe_routing",
        "router_logits",
        ("bias",),
        conditions.common_routing_fits,
        True,
    ),
    (
        *("inferc.moe_experts", "expert_calls:moe_experts", "x", ("gate_up", "down", *_BIASES, *_SCALES)),
        *(conditions.grouped_experts_fit, True),
    ),
)


def _more_triton_kernels() -> tuple[Kernel, ...]:
    def kernel(op: str, call: str, why_not: Callable[[fx.Node, Target], str], *weights: str) -> Kernel:
        name = f"triton.{call.partition(':')[2].rstrip('_')}"
        return Kernel("triton", op, name, why_not, f"inferc.codegen.triton.{call}", dict.fromkeys(weights, None))

    writes = conditions.ForTriton("k", uses_cache=True)
    return (
        *(
            kernel(op, call, conditions.ForTriton(deciding, check, mixed=mixed), *weights)
            for op, call, deciding, weights, check, mixed in _TRITON_MORE_ROWS
        ),
        kernel("inferc.kv_write", "more_calls:kv_write_", writes),
        kernel("inferc.pointwise", "more_calls:pointwise_", conditions.triton_pointwise_fits),
    )


def _triton_kernels() -> tuple[Kernel, ...]:
    return tuple(
        Kernel(
            "triton",
            op,
            f"triton.{op.partition('.')[2]}",
            conditions.ForTriton(deciding, check, uses_cache=rows is _TRITON_CACHE_ROWS),
            f"inferc.codegen.triton.calls:{call}",
            dict.fromkeys(weights, None),
        )
        for rows in (_TRITON_ROWS, _TRITON_CACHE_ROWS)
        for op, call, deciding, weights, check in rows
    )


_OwnCheck = Callable[[fx.Node], str] | None
# op, module and name of the call, condition
_ONNX_ROWS: tuple[tuple[str, str, _OwnCheck], ...] = (
    ("aten.embedding", "calls:embedding", None),
    ("aten.linear", "calls:linear", None),
    ("aten.add.Tensor", "calls:add", None),
    ("aten.mul.Tensor", "calls:mul", None),
    ("aten.cat", "calls:cat", None),
    ("aten.index_select", "calls:index_select", None),
    ("inferc.head_linear", "calls:head_linear", None),
    ("inferc.linear_wide", "calls:linear_wide", None),
    ("inferc.lm_head", "calls:lm_head", None),
    ("inferc.layer_norm", "calls:layer_norm", None),
    ("inferc.rms_norm", "calls:rms_norm", None),
    ("inferc.rope_table", "calls:rope_table", None),
    ("inferc.rope", "calls:rope", None),
    ("inferc.silu_mul", "calls:silu_mul", None),
    ("inferc.gelu_mul", "calls:gelu_mul", None),
    ("inferc.pointwise", "calls:pointwise", conditions.broadcasts),
    ("inferc.dense_write", "calls:dense_write", None),
    ("inferc.dense_attention", "calls:dense_attention", None),
    ("inferc.dense_latent_attention", "calls:dense_latent_attention", None),
    ("inferc.quantize_rows", "integer_calls:quantize_rows", None),
    ("inferc.moe_routing", "expert_calls:moe_routing", conditions.is_common_score),
)
# The same of what reads weights in a layout, those with onnxruntime's own ops before those without.
_ONNX_TIED_ROWS: tuple[tuple[str, str, _OwnCheck, dict[str, str | None]], ...] = (
    (
        *("inferc.embedding_int8", "integer_calls:embedding_int8_columns", conditions.is_multiplied_as_integers),
        {"weight": "transposed"},
    ),
)
_ONNX_OWN_ROWS: tuple[tuple[str, str, _OwnCheck, dict[str, str | None]], ...] = (
    ("inferc.dense_write_attention", "calls:dense_write_attention", None, {}),
    ("inferc.embedding_int8", "integer_calls:embedding_int8", conditions.blocks_fit, {"weight": "unsigned"}),
    ("inferc.linear_int8", "integer_calls:linear_int8", conditions.blocks_fit, {"weight": "unsigned"}),
    ("inferc.linear_int4", "integer_calls:linear_int4", None, {"weight": "neighbours"}),
    ("inferc.moe_experts", "expert_calls:moe_experts", conditions.moe_fits, {"gate_up": "pairs"}),
    (
        *("inferc.moe_experts", "expert_calls:moe_experts_int8", conditions.qmoe_int8_fits),
        {"gate_up": "pairs_unsigned", "down": "unsigned"},
    ),
    (
        *("inferc.moe_experts", "expert_calls:moe_experts_int4", conditions.qmoe_int4_fits),
        {"gate_up": "pairs_neighbours", "down": "neighbours"},
    ),
)
_ONNX_WIDE_ROWS: tuple[tuple[str, str, _OwnCheck, dict[str, str | None]], ...] = (
    ("inferc.embedding_int8", "integer_calls:embedding_int8_plain", None, {"weight": None}),
    ("inferc.linear_int8", "integer_calls:linear_int8_wide", None, {"weight": None}),
    ("inferc.linear_int4", "integer_calls:linear_int4_wide", None, {"weight": "neighbours_signed"}),
    ("inferc.linear_w8a8", "integer_calls:linear_w8a8", None, {"weight": "transposed"}),
    ("inferc.moe_experts", "expert_calls:all_experts", conditions.float_experts, {"gate_up": None, "down": None}),
    ("inferc.moe_experts", "expert_calls:all_experts_int8", conditions.int8_experts, {"gate_up": None, "down": None}),
    (
        *("inferc.moe_experts", "expert_calls:all_experts_int4", conditions.int4_experts),
        {"gate_up": "neighbours_signed", "down": "neighbours_signed"},
    ),
)


_ON_CPU = ("expert_calls:moe_experts_int8", "expert_calls:moe_experts_int4")  # a GPU's QMoE has them in another order


def _onnx_kernels() -> tuple[Kernel, ...]:
    def kernel(op: str, call: str, why_not: conditions.ForOnnx, layouts: dict[str, str | None]) -> Kernel:
        return Kernel(
            *("onnx", op, f"onnx.{call.partition(':')[2]}", why_not, f"inferc.codegen.onnx.{call}"),
            weight_layouts=layouts,
        )

    return (
        *(kernel(op, call, conditions.ForOnnx(check), {}) for op, call, check in _ONNX_ROWS),
        *(
            kernel(op, call, conditions.ForOnnx(check, rows is _ONNX_OWN_ROWS, call in _ON_CPU), layouts)
            for rows in (_ONNX_TIED_ROWS, _ONNX_OWN_ROWS, _ONNX_WIDE_ROWS)
            for op, call, check, layouts in rows
        ),
    )


# op, name of the call, condition
_TENSORRT_ROWS: tuple[tuple[str, str, Callable[[fx.Node, Target], str]], ...] = (
    ("aten.embedding", "calls:embedding", conditions.tensorrt_lookup),
    ("aten.linear", "calls:linear", conditions.tensorrt_only),
    ("aten.add.Tensor", "calls:add", conditions.tensorrt_only),
    ("aten.mul.Tensor", "calls:mul", conditions.tensorrt_only),
    ("aten.cat", "calls:cat", conditions.tensorrt_only),
    ("aten.index_select", "calls:index_select", conditions.tensorrt_only),
    ("inferc.head_linear", "calls:head_linear", conditions.tensorrt_only),
    ("inferc.linear_wide", "calls:linear_wide", conditions.tensorrt_only),
    ("inferc.lm_head", "calls:lm_head", conditions.tensorrt_only),
    ("inferc.layer_norm", "calls:layer_norm", conditions.tensorrt_only),
    ("inferc.rms_norm", "calls:rms_norm", conditions.tensorrt_only),
    ("inferc.rope_table", "calls:rope_table", conditions.tensorrt_only),
    ("inferc.rope", "calls:rope", conditions.tensorrt_only),
    ("inferc.silu_mul", "calls:silu_mul", conditions.tensorrt_only),
    ("inferc.gelu_mul", "calls:gelu_mul", conditions.tensorrt_only),
    ("inferc.pointwise", "calls:pointwise", conditions.tensorrt_pointwise_fits),
    ("inferc.dense_write", "attention_calls:dense_write", conditions.tensorrt_only),
    ("inferc.dense_attention", "attention_calls:dense_attention", conditions.tensorrt_fuses),
    ("inferc.dense_attention", "attention_calls:spelled_attention", conditions.tensorrt_only),
    ("inferc.dense_latent_attention", "attention_calls:spelled_latent_attention", conditions.tensorrt_only),
    ("inferc.moe_routing", "expert_calls:moe_routing", conditions.tensorrt_routing),
    ("inferc.moe_experts", "expert_calls:all_experts", conditions.tensorrt_experts_fit),
    ("inferc.linear_int8", "calls:linear_int8", conditions.tensorrt_only),
    ("inferc.embedding_int8", "calls:embedding_int8", conditions.tensorrt_packed_lookup),
    ("inferc.quantize_rows", "rounded_calls:quantize_rows", conditions.tensorrt_only),
    ("inferc.linear_w8a8", "rounded_calls:linear_w8a8", conditions.tensorrt_only),
    ("inferc.quantize_rows_fp8", "rounded_calls:quantize_rows_fp8", conditions.tensorrt_fp8),
    ("inferc.linear_fp8", "rounded_calls:linear_fp8", conditions.tensorrt_fp8),
)

_COLLECTIVES = {
    "inferc.all_reduce",
    "inferc.all_gather",
    "inferc.expert_choose",
    "inferc.expert_dispatch",
    "inferc.expert_combine",
}
_REFERENCE_OPS = sorted(
    {row[0] for row in (*_CPP_ROWS, *_CACHE_ROWS)}
    | {row[0] for row in _INT8_ROWS}
    | {row[0] for row in _INT4_ROWS}
    | {"inferc.quantize_rows_fp8", "inferc.linear_fp8"}
    | {"inferc.rope_table", "inferc.attention", "inferc.pointwise", "aten.cat"}
    | _COLLECTIVES
)

KERNELS: tuple[Kernel, ...] = (
    *_cpp_kernels(),
    *_more_triton_kernels(),
    *_triton_kernels(),
    *_onnx_kernels(),
    *(
        Kernel("tensorrt", op, f"tensorrt.{call.partition(':')[2]}", why_not, f"inferc.codegen.tensorrt.{call}")
        for op, call, why_not in _TENSORRT_ROWS
    ),
    *(Kernel("reference", op, f"reference.{op}", conditions.reference_only) for op in _REFERENCE_OPS),
)


def needs_kernel(node: fx.Node) -> bool:
    """Whether the node computes something (aliases, inputs, weights and the output do not)."""
    return node.op == "call_function" and target_name(node.target) not in ALIAS_OPS


def select(node: fx.Node, target: Target, kernels: tuple[Kernel, ...] = KERNELS) -> Kernel:
    """The first of `kernels` that runs `node` on `target`.

    Raises UnsupportedError naming the node, the target and the reasons of the op's kernels.
    """
    op = target_name(node.target)
    reasons: list[str] = []
    for kernel in kernels:
        if kernel.op == op:
            reason = kernel.why_not(node, target)
            if not reason:
                return kernel
            reasons.append(reason)
    reasons = [reason for reason in dict.fromkeys(reasons) if reason != OTHER_TARGET]
    if not reasons:
        raise cannot_run(node, target)
    told = "; ".join(reason for reason in reasons if reason != OTHER_CASE)
    kinds = ", ".join(_describe(arg) for arg in node.args)
    told = told or f"{op}({kinds}): expected bfloat16 or float32"
    raise UnsupportedError(f"{told} (node {name_of(node)}, target {target.spec})")


def cannot_run(node: fx.Node, target: Target | None = None) -> UnsupportedError:
    """The refusal of a model that needs an op which is not built, on `target` or anywhere."""
    on = f" on target {target.spec}" if target else ""
    op = target_name(node.target)
    if op.partition(".")[0] not in ("aten", "inferc") and "." in op:
        return UnsupportedError(f"{op} (node {name_of(node)}) has no kernel{on}; its pass must bring one in `kernels`")
    what = ", of a rotary embedding of a kind that is not known" if op in ("aten.cos", "aten.sin") else ""
    return UnsupportedError(
        f"inferc cannot run {op} yet (node {name_of(node)}{what}): this model's family is not supported{on}"
    )


def kernel_named(name: str, kernels: tuple[Kernel, ...] = KERNELS) -> Kernel:
    """The row that a node's `meta["kernel"]` names."""
    for kernel in kernels:
        if kernel.name == name:
            return kernel
    raise UnsupportedError(f"unknown kernel {name!r}; this program was lowered by another version of inferc")


def chosen_kernel(node: fx.Node, backend: str, kernels: tuple[Kernel, ...] = KERNELS) -> Kernel:
    """The kernel that was chosen for `node`. Raises UnsupportedError if none was, or another backend's."""
    if "kernel" not in node.meta:
        raise UnsupportedError(f"{name_of(node)}: {target_name(node.target)} has no kernel; run choose_kernels")
    kernel = kernel_named(node.meta["kernel"], kernels)
    if kernel.backend != backend:
        on = {"cpp": "the cpu", "triton": "a GPU", "onnx": "onnxruntime", "tensorrt": "TensorRT"}[backend]
        raise UnsupportedError(f"{name_of(node)}: kernel {kernel.name} is not for {on}")
    return kernel


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{dtype_name(value.dtype)}{conditions.sizes(tuple(value.shape))}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(_type(item) for item in value) + ")"
    return "?"


def _describe(arg: Any) -> str:
    return _type(arg.meta.get("val")) if isinstance(arg, fx.Node) else repr(arg)
