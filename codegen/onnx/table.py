"""The table of ONNX kernels: how each op is written, by onnxruntime's own ops where it has them, best first."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from inferc.codegen import conditions as shared
from inferc.codegen.kernel import Fits, Kernel
from inferc.codegen.onnx import conditions

_OwnCheck = Callable[[fx.Node], str] | None
# op, module and name of the call, condition
_ONNX_ROWS: tuple[tuple[str, str, _OwnCheck], ...] = (
    ("aten.embedding", "elementwise:embedding", None),
    ("aten.linear", "matmul:linear", None),
    ("aten.add.Tensor", "elementwise:add", None),
    ("aten.mul.Tensor", "elementwise:mul", None),
    ("aten.cat", "elementwise:cat", None),
    ("aten.index_select", "elementwise:index_select", None),
    ("inferc.head_linear", "matmul:head_linear", None),
    ("inferc.linear_wide", "matmul:linear_wide", None),
    ("inferc.lm_head", "matmul:lm_head", None),
    ("inferc.layer_norm", "norms:layer_norm", None),
    ("inferc.rms_norm", "norms:rms_norm", None),
    ("inferc.rope_table", "attention:rope_table", None),
    ("inferc.rope", "attention:rope", None),
    ("inferc.silu_mul", "elementwise:silu_mul", None),
    ("inferc.gelu_mul", "elementwise:gelu_mul", None),
    ("inferc.pointwise", "elementwise:pointwise", shared.broadcasts),
    ("inferc.dense_write", "attention:dense_write", None),
    ("inferc.dense_attention", "attention:dense_attention", None),
    ("inferc.dense_latent_attention", "attention:dense_latent_attention", None),
    ("inferc.quantize_rows", "quantized:quantize_rows", None),
    ("inferc.moe_routing", "moe:moe_routing", shared.is_common_score),
)
# Rows with the layouts of the weights: those with onnxruntime's own ops come before those without.
_ONNX_TIED_ROWS: tuple[tuple[str, str, _OwnCheck, dict[str, str | None]], ...] = (
    (
        "inferc.embedding_int8",
        "quantized:embedding_int8_columns",
        conditions.is_multiplied_as_integers,
        {"weight": "transposed"},
    ),
)
_ONNX_OWN_ROWS: tuple[tuple[str, str, _OwnCheck, dict[str, str | None]], ...] = (
    ("inferc.dense_write_attention", "attention:dense_write_attention", None, {}),
    ("inferc.embedding_int8", "quantized:embedding_int8", conditions.blocks_fit, {"weight": "unsigned"}),
    ("inferc.linear_int8", "quantized:linear_int8", conditions.blocks_fit, {"weight": "unsigned"}),
    ("inferc.linear_int4", "quantized:linear_int4", None, {"weight": "neighbours"}),
    ("inferc.moe_experts", "moe:moe_experts", conditions.moe_fits, {"gate_up": "pairs"}),
    (
        "inferc.moe_experts",
        "moe:moe_experts_int8",
        conditions.qmoe_int8_fits,
        {"gate_up": "pairs_unsigned", "down": "unsigned"},
    ),
    (
        "inferc.moe_experts",
        "moe:moe_experts_int4",
        conditions.qmoe_int4_fits,
        {"gate_up": "pairs_neighbours", "down": "neighbours"},
    ),
)
_ONNX_WIDE_ROWS: tuple[tuple[str, str, _OwnCheck, dict[str, str | None]], ...] = (
    ("inferc.embedding_int8", "quantized:embedding_int8_plain", None, {"weight": None}),
    ("inferc.linear_int8", "quantized:linear_int8_wide", None, {"weight": None}),
    ("inferc.linear_int4", "quantized:linear_int4_wide", None, {"weight": "neighbours_signed"}),
    ("inferc.linear_w8a8", "quantized:linear_w8a8", None, {"weight": "transposed"}),
    ("inferc.moe_experts", "moe:all_experts", conditions.float_experts, {"gate_up": None, "down": None}),
    ("inferc.moe_experts", "moe:all_experts_int8", conditions.int8_experts, {"gate_up": None, "down": None}),
    (
        "inferc.moe_experts",
        "moe:all_experts_int4",
        conditions.int4_experts,
        {"gate_up": "neighbours_signed", "down": "neighbours_signed"},
    ),
)


def _kernel(op: str, call: str, check: _OwnCheck, layouts: dict[str, str | None]) -> Kernel:
    name, emit = f"onnx.{call.partition(':')[2]}", f"inferc.codegen.onnx.calls.{call}"
    return Kernel("onnx", op, name, Fits(check), emit, layouts)


def _kernels(rows: tuple[tuple[str, str, _OwnCheck, dict[str, str | None]], ...]) -> tuple[Kernel, ...]:
    return tuple(_kernel(op, call, check, layouts) for op, call, check, layouts in rows)


_PLAIN = tuple(_kernel(op, call, check, {}) for op, call, check in _ONNX_ROWS)
_ON_CPU = ("onnx.moe_experts_int8", "onnx.moe_experts_int4")  # the QMoE of a GPU has weights in another order

KERNELS = (*_PLAIN, *_kernels(_ONNX_TIED_ROWS), *_kernels(_ONNX_OWN_ROWS), *_kernels(_ONNX_WIDE_ROWS))
"""The kernels for onnxruntime on a CPU."""
STANDARD_KERNELS = (*_PLAIN, *_kernels(_ONNX_TIED_ROWS), *_kernels(_ONNX_WIDE_ROWS))
"""The kernels without onnxruntime's own ops."""
CUDA_KERNELS = tuple(kernel for kernel in KERNELS if kernel.name not in _ON_CPU)
"""The kernels for onnxruntime on a GPU."""
