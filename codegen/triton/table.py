"""The table that says which Triton kernel runs which op on a GPU, best first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from inferc.codegen import conditions as shared
from inferc.codegen.kernel import Fits, Kernel
from inferc.codegen.triton import conditions
from inferc.targets import Target

_QKV = ("weight", "scale", "bias", "q_weight", "k_weight")
_EXPERTS = ("gate_up", "down", "gate_up_bias", "down_bias", "gate_up_scale", "down_scale")


def _kernel(op: str, call: str, why_not: Callable[[fx.Node, Target], str], weights: Sequence[str] = ()) -> Kernel:
    """Return a kernel that is named as its call is: "module:function" of codegen/triton/calls/."""
    name = f"triton.{call.partition(':')[2].rstrip('_')}"
    return Kernel("triton", op, name, why_not, f"inferc.codegen.triton.calls.{call}", dict.fromkeys(weights, None))


def _row(
    op: str,
    call: str,
    deciding: str,
    check: Callable[[fx.Node], str] | None = None,
    weights: Sequence[str] = (),
    *,
    mixed: bool = False,
    uses_cache: bool = False,
) -> Kernel:
    """Return a kernel that runs nodes whose argument `deciding` is of a dtype of the GPU's and which `check` lets pass.

    mixed: its weights may have dtypes of their own. uses_cache: it reads or writes the KV cache.
    """
    return _kernel(op, call, conditions.ForTriton(deciding, check, uses_cache=uses_cache, mixed=mixed), weights)


KERNELS = (
    _row("aten.embedding", "elementwise:embedding_by_position", "weight", conditions.lookup_by_position, ["weight"]),
    _row("aten.linear", "matmul:linear_", "input", None, ["weight", "bias"]),
    _row("inferc.linear_wide", "matmul:linear_wide", "x", None, ["weight"]),
    _row("inferc.linear_add", "matmul:linear_add", "x", None, ["weight", "bias"]),
    _row("inferc.lm_head", "matmul:lm_head", "hidden", None, ["weight", "bias"]),
    _row(
        "inferc.linear_silu_mul",
        "matmul:linear_silu_mul_",
        "x",
        conditions.gated_fits,
        ["weight", "scale", "bias"],
        mixed=True,
    ),
    _row("inferc.linear_int8", "matmul:linear_int8", "x", None, ["weight", "scale", "bias"], mixed=True),
    _row(
        "inferc.qkv_rope_kv_write",
        "matmul:qkv_rope_kv_write_",
        "x",
        conditions.qkv_fits,
        _QKV,
        mixed=True,
    ),
    _row("aten.add.Tensor", "elementwise:add", "self", shared.same_shapes),
    _row("aten.mul.Tensor", "elementwise:mul", "self", shared.same_shapes),
    _row("inferc.gelu_mul", "elementwise:gelu_mul", "gate"),
    _row("inferc.layer_norm", "norms:layer_norm_", "x", None, ["weight", "bias"]),
    _row("inferc.rms_norm", "norms:rms_norm_heads", "x", conditions.heads_of_rows, ["weight"]),
    _row("inferc.rms_norm_add", "norms:rms_norm_of_sum", "x", conditions.sum_is_unread, ["weight"]),
    _row("inferc.rope", "attention:rope_", "x", shared.rope_fits),
    _row("inferc.resize_heads", "elementwise:resize_heads", "x"),
    _row("inferc.embedding_int8", "elementwise:embedding_int8_", "scale", None, ["weight", "scale"], mixed=True),
    _row(
        "inferc.moe_routing",
        "moe:moe_routing",
        "router_logits",
        conditions.common_routing_fits,
        ["bias"],
        mixed=True,
    ),
    _row("inferc.moe_experts", "moe:moe_experts", "x", conditions.grouped_experts_fit, _EXPERTS, mixed=True),
    _kernel("inferc.kv_write", "attention:kv_write_", conditions.ForTriton("k", uses_cache=True)),
    _kernel("inferc.pointwise", "elementwise:pointwise_", Fits(conditions.pointwise_fits)),
    _kernel("aten.cat", "elementwise:concat", Fits(conditions.concat_fits)),
    _row("aten.embedding", "elementwise:embedding", "weight", shared.plain_lookup, ["weight"]),
    _row("aten.index_select", "elementwise:index_select", "self", shared.first_axis),
    _row("inferc.rms_norm", "norms:rms_norm_", "x", conditions.one_row_each, ["weight"]),
    _row("inferc.rms_norm_add", "norms:rms_norm_add", "x", conditions.one_row_each, ["weight"]),
    _row("inferc.silu_mul", "elementwise:silu_mul_", "gate"),
    _row("inferc.lora_shrink", "lora:lora_shrink", "adapters", shared.adapters_fit),
    _row("inferc.lora_lookup", "lora:lora_lookup", "adapters"),
    _row("inferc.lora_expand", "lora:lora_expand", "adapters"),
    _row("inferc.rope_table", "attention:rope_table", "inv_freq", None, ["inv_freq"]),
    _row("inferc.rope_kv_write", "attention:rope_kv_write", "q", shared.rope_fits, uses_cache=True),
    _row(
        "inferc.norm_rope_kv_write",
        "attention:norm_rope_kv_write",
        "q",
        shared.rope_fits,
        ["q_weight", "k_weight"],
        uses_cache=True,
    ),
    _row(
        "inferc.paged_attention",
        "attention:paged_attention_",
        "q",
        shared.heads_fit,
        ["sinks", "alibi"],
        uses_cache=True,
    ),
)
