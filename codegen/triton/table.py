"""Which Triton kernel runs which op on a GPU, best first."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from inferc.codegen import conditions as shared
from inferc.codegen.kernel import Fits, Kernel
from inferc.codegen.triton import conditions
from inferc.targets import Target

_BIASES = ("gate_up_bias", "down_bias")
_SCALES = ("gate_up_scale", "down_scale")
# op, name of the kernel and of its call, argument whose dtype decides, weights, condition
_TRITON_ROWS: tuple[tuple[str, str, str, tuple[str, ...], Callable[[fx.Node], str] | None], ...] = (
    ("aten.embedding", "embedding", "weight", ("weight",), shared.plain_lookup),
    ("aten.index_select", "index_select", "self", (), shared.first_axis),
    ("inferc.rms_norm", "rms_norm_", "x", ("weight",), conditions.one_row_each),
    ("inferc.rms_norm_add", "rms_norm_add", "x", ("weight",), conditions.one_row_each),
    ("inferc.silu_mul", "silu_mul_", "gate", (), None),
    ("inferc.rope_table", "rope_table", "inv_freq", ("inv_freq",), None),
)
_TRITON_CACHE_ROWS: tuple[tuple[str, str, str, tuple[str, ...], Callable[[fx.Node], str] | None], ...] = (
    ("inferc.rope_kv_write", "rope_kv_write", "q", (), shared.rope_fits),
    ("inferc.norm_rope_kv_write", "norm_rope_kv_write", "q", ("q_weight", "k_weight"), shared.rope_fits),
    ("inferc.paged_attention", "paged_attention_", "q", ("sinks", "alibi"), shared.heads_fit),
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
        *(conditions.gated_fits, True),
    ),
    ("inferc.linear_int8", "product_calls:linear_int8", "x", ("weight", "scale", "bias"), None, True),
    (
        *("inferc.qkv_rope_kv_write", "product_calls:qkv_rope_kv_write_", "x"),
        *(("weight", "scale", "bias", "q_weight", "k_weight"), conditions.qkv_fits, True),
    ),
    ("aten.add.Tensor", "more_calls:add", "self", (), shared.same_shapes, False),
    ("aten.mul.Tensor", "more_calls:mul", "self", (), shared.same_shapes, False),
    ("inferc.gelu_mul", "more_calls:gelu_mul", "gate", (), None, False),
    ("inferc.layer_norm", "more_calls:layer_norm_", "x", ("weight", "bias"), None, False),
    ("inferc.rms_norm", "more_calls:rms_norm_heads", "x", ("weight",), conditions.heads_of_rows, False),
    ("inferc.rms_norm_add", "more_calls:rms_norm_of_sum", "x", ("weight",), conditions.sum_is_unread, False),
    ("inferc.rope", "more_calls:rope", "x", (), shared.rope_fits, False),
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
        kernel("inferc.pointwise", "more_calls:pointwise_", Fits(conditions.pointwise_fits)),
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


KERNELS = (*_more_triton_kernels(), *_triton_kernels())
