"""Which kernel runs which op on which target: an explicit table, best first.

Selection happens at compile time and reads dtypes, shapes and the target only; the chosen kernel's name is stored in
the node and in the artifact. A new backend is new rows and files here, not edits to passes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx

from inferc.errors import ConfigError, UnsupportedError
from inferc.ops import cached_head_dim
from inferc.ops.quantize import int4_group
from inferc.program import dtype_name, name_of, target_name

DEVICES = ("cpu", "cuda", "reference")

# Views: they have no kernel, only another address or row stride of what they read.
ALIAS_OPS = ("aten.slice.Tensor", "aten.view", "getitem")

OTHER_TARGET = "another target's kernel"
OTHER_CASE = "another kernel's dtype or case"


@dataclass(frozen=True)
class Target:
    """What an artifact is compiled for: `cpu`, `reference`, or `cuda` with an architecture (`sm_90`)."""

    device: Literal["cpu", "cuda", "reference"]
    arch: str = ""

    @staticmethod
    def parse(spec: str) -> Target:
        """From the command line's form: `cpu`, `reference`, `cuda:sm_90`. Raises ConfigError."""
        device, _, arch = spec.partition(":")
        if device not in DEVICES:
            raise ConfigError(f"unknown target {spec!r}; expected one of {', '.join(DEVICES)} (cuda as cuda:sm_90)")
        if (device == "cuda") != arch.startswith("sm_"):
            raise ConfigError(f"target {spec!r}: write cpu, reference or cuda:sm_NN")
        return Target(device, arch)  # type: ignore[arg-type]

    @property
    def spec(self) -> str:
        return f"{self.device}:{self.arch}" if self.arch else self.device


@dataclass(frozen=True)
class Kernel:
    """One implementation of one op. `emit` is "module:function", imported only when code is made, or the function.

    why_not: a reason for people why it cannot run a node on a target ("head_dim 24: expected a multiple of 16"), ""
    where it can, OTHER_TARGET or OTHER_CASE where it was never meant to.
    weight_layouts: for each argument that reads a weight, the physical layout (inferc.weights.LAYOUTS) in which the
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
        """The function that makes this kernel's source (cpp) or launch record (triton)."""
        if callable(self.emit):
            return self.emit
        module, _, name = self.emit.partition(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return function


def argument(node: fx.Node, name: str) -> Any:
    """The node's argument by its schema name (positional, keyword or default)."""
    if name in node.kwargs:
        return node.kwargs[name]
    schema = node.target._schema  # type: ignore[union-attr]
    for index, parameter in enumerate(schema.arguments):
        if parameter.name == name:
            return node.args[index] if index < len(node.args) else parameter.default_value
    raise AssertionError(f"{schema.name} has no argument {name}")


def _dtype(node: fx.Node, name: str) -> torch.dtype | None:
    value = argument(node, name)
    value = value.meta.get("val") if isinstance(value, fx.Node) else None
    return value.dtype if isinstance(value, Tensor) else None


def _shape(node: fx.Node, name: str) -> tuple[Any, ...]:
    return tuple(argument(node, name).meta["val"].shape)


def is_tied(node: fx.Node, name: str = "weight") -> bool:
    """Whether another node multiplies by this node's weight, which is then stored packed and only once."""
    weight = argument(node, name)
    readers = (
        user
        for other in node.graph.nodes
        if other.op == "get_attr" and other.target == weight.target
        for user in other.users
    )
    return any(target_name(user.target) in _MULTIPLIES for user in readers)


_MULTIPLIES = ("aten.linear", "inferc.lm_head", "inferc.linear_int8", "inferc.linear_w8a8")


# ------------------------------------------------------------------------- why not: "" where the kernel runs


def _joined(*reasons: str) -> str:
    """The reasons there are, in one line."""
    return ", and ".join(reason for reason in reasons if reason)


def _at_most(name: str, found: Any, most: int) -> str:
    return f"{name} {found}: expected at most {most}" if found > most else ""


def _multiple(name: str, found: Any, of: int) -> str:
    return f"{name} {found}: expected a multiple of {of}" if found % of else ""


def _same_shapes(node: fx.Node) -> str:
    other = argument(node, "other")
    if isinstance(other, (int, float)) or _shape(node, "self") == _shape(node, "other"):
        return ""
    found = f"{_sizes(_shape(node, 'self'))} and {_sizes(_shape(node, 'other'))}"
    return f"{target_name(node.target)} of {found}: expected equal shapes"


def _first_axis(node: fx.Node) -> str:
    dim = argument(node, "dim")
    return "" if dim == 0 else f"axis {dim}: expected rows, which are axis 0"


def _last_axis(node: fx.Node) -> str:
    dim, rank = argument(node, "dim"), node.meta["val"].dim()
    return "" if dim % rank == rank - 1 else f"axis {dim}: expected columns, which are the last axis"


def _head_dim_fits(dim: int) -> str:
    return f"head_dim {dim}: expected a multiple of 16, at most 512" if dim % 16 or dim > 512 else ""


def _heads_fit(node: fx.Node) -> str:
    """attention.h: heads of at most 512 elements in steps of 16."""
    num_heads, dim = _shape(node, "q")[1:]
    block_size, num_kv_heads = _shape(node, "kv_cache")[3:5]
    cached_dim = _cached_dim(node)
    if _head_dim_fits(dim):
        return _head_dim_fits(dim)
    if dim != cached_dim:
        return f"head_dim {dim}: expected that of the values, {cached_dim}"
    if num_heads % num_kv_heads:
        return f"{num_heads} heads on {num_kv_heads} KV heads: expected a whole number on each"
    return _multiple("block_size", block_size, 16)


def _latents_fit(node: fx.Node) -> str:
    """attention.h: V of at most 512 elements in latents of at most 1024, both in steps of 16."""
    block_size, dim = _shape(node, "kv_cache")[3], _cached_dim(node)
    v_dim = argument(node, "v_dim")
    steps = _joined(_multiple("the latent's size", dim, 16), _multiple("its values' size", v_dim, 16))
    most = _joined(_at_most("the latent's size", dim, 1024), _at_most("its values' size", v_dim, 512))
    return _joined(steps, most, _multiple("block_size", block_size, 16))


def _experts_fit(node: fx.Node) -> str:
    """moe.h: at most 1024 experts, their inner rows in whole panels."""
    num_experts, both, _ = _shape(node, "gate_up")
    return _joined(
        _at_most("num_experts", num_experts, 1024), _multiple("the experts' intermediate_size", both // 2, 16)
    )


def _float_experts_fit(node: fx.Node) -> str:
    return _experts_fit(node) if _dtype(node, "down") == _dtype(node, "x") else OTHER_CASE


def _int8_experts_fit(node: fx.Node) -> str:
    return OTHER_CASE if _dtype(node, "x") == torch.int8 else _experts_fit(node)


def _w8a8_experts_fit(node: fx.Node) -> str:
    if _dtype(node, "x") != torch.int8:
        return OTHER_CASE
    hidden, inter = _shape(node, "down")[1:]
    return _joined(
        _experts_fit(node),
        _at_most("hidden_size", hidden, INT32_HOLDS),
        _at_most("the experts' intermediate_size", inter, INT32_HOLDS),
    )


def _w4a8_experts_fit(node: fx.Node) -> str:
    if _dtype(node, "x") != torch.int8:
        return OTHER_CASE
    hidden, inter = _shape(node, "gate_up")[2] * 2, _shape(node, "down")[2] * 2  # two to a byte
    return _joined(
        _experts_fit(node),
        *(_group_fits(node, each, f"{each}_group_scale") for each in ("gate_up", "down")),
        _at_most("hidden_size", hidden, INT4_LONGEST),
        _at_most("the experts' intermediate_size", inter, INT4_LONGEST),
    )


def _ranks_fit(node: fx.Node) -> str:
    """exchange.h: the ranks of a token are the bits of one word."""
    return _at_most("--ep", argument(node, "size"), 64)


INT32_HOLDS = (2**31 - 1) // 127**2
"""Products of at most 127 x 127 that a sum of Dot<i8> in simd.h may have."""
INT4_LONGEST = 1 << 16
"""Of k in four bits: scales of groups are then at least five bits, see `ops.quantize.largest_group_scale`."""


def _int32_holds(node: fx.Node) -> str:
    return _at_most("in_features", _shape(node, "weight")[1], INT32_HOLDS)


def _routing_fits(node: fx.Node) -> str:
    num_experts = _shape(node, "router_logits")[1]
    most = _at_most("num_experts", num_experts, 1024)
    return _joined(most, _at_most("top_k", argument(node, "top_k"), num_experts))


def _rope_fits(node: fx.Node) -> str:
    name = "x" if target_name(node.target) == "inferc.rope" else "q"
    return _at_most("rotary dimension", _shape(node, "table")[-1], _shape(node, name)[-1])


def _cached_dim(node: fx.Node) -> int:
    return cached_head_dim(argument(node, "kv_cache").meta["val"])


def _heads_are_panels(node: fx.Node) -> str:
    """kv.h: a head is whole panels, and what it is rotated in lies on the stack."""
    head_dim = _cached_dim(node)
    return _joined(_head_dim_fits(head_dim), _at_most("rotary dimension", _shape(node, "table")[-1], head_dim))


def _float_qkv_fits(node: fx.Node) -> str:
    return _heads_are_panels(node) if argument(node, "scale") is None else OTHER_CASE


def _int8_qkv_fits(node: fx.Node) -> str:
    return _heads_are_panels(node) if argument(node, "x_scale") is None else OTHER_CASE


def _w8a8_qkv_fits(node: fx.Node) -> str:
    return OTHER_CASE if argument(node, "x_scale") is None else _joined(_heads_are_panels(node), _int32_holds(node))


def _w4a8_qkv_fits(node: fx.Node) -> str:
    return _joined(_heads_are_panels(node), _four_bits_fit(node))


def _packed_lookup(node: fx.Node) -> str:
    return "" if is_tied(node) else OTHER_CASE


def _plain_lookup(node: fx.Node) -> str:
    plain = argument(node, "scale_grad_by_freq") is False and argument(node, "sparse") is False
    return "" if plain else "an embedding with options of training: expected a plain one"


def _four_bits_fit(node: fx.Node) -> str:
    return _joined(_group_fits(node, "weight", "group_scale"), _at_most("k", _shape(node, "x")[1], INT4_LONGEST))


def _group_fits(node: fx.Node, weight: str, group_scale: str) -> str:
    group = int4_group(argument(node, weight).meta["val"], argument(node, group_scale).meta["val"])
    return "" if group in (32, 64, 128) else f"weights in groups of {group}: expected 32, 64 or 128"


@dataclass(frozen=True)
class _Cpp:
    """Why not, of a cpp kernel: it is for the CPU, `argument` has `dtype`, and `check` has no reason either.

    int8_cache: of what uses the KV cache, whether that is in int8 and not in `dtype`.
    """

    argument: str
    dtype: torch.dtype
    check: Callable[[fx.Node], str] | None = None
    int8_cache: bool | None = None

    def __call__(self, node: fx.Node, target: Target) -> str:
        if target.device != "cpu":
            return OTHER_TARGET
        if _dtype(node, self.argument) != self.dtype:
            return OTHER_CASE
        reason = "" if self.int8_cache is None else _cache_fits(node, self.dtype, self.int8_cache)
        return reason or ("" if self.check is None else self.check(node))


@dataclass(frozen=True)
class _CppIntegers:
    """The same for integer weights: the argument `weight` is `stored`, the result, or the first of several, in `dtype`."""

    weight: str
    dtype: torch.dtype
    check: Callable[[fx.Node], str] | None = None
    stored: torch.dtype = torch.int8
    int8_cache: bool | None = None

    def __call__(self, node: fx.Node, target: Target) -> str:
        if target.device != "cpu":
            return OTHER_TARGET
        result = node.meta["val"]
        first = result if isinstance(result, Tensor) else result[0]
        if _dtype(node, self.weight) != self.stored or first.dtype != self.dtype:
            return OTHER_CASE
        reason = "" if self.int8_cache is None else _cache_fits(node, self.dtype, self.int8_cache)
        return reason or ("" if self.check is None else self.check(node))


def _cache_fits(node: fx.Node, dtype: torch.dtype, in_int8: bool) -> str:
    cache = _dtype(node, "kv_cache")
    if (cache == torch.int8) != in_int8:
        return OTHER_CASE
    return "" if cache in (torch.int8, dtype) else f"a KV cache of {cache}: expected {dtype}, that of the keys, or int8"


def _cat(node: fx.Node, target: Target) -> str:
    if target.device != "cpu":
        return OTHER_TARGET
    parts: Any = node.args[0]
    rank = node.meta["val"].dim()
    if (argument(node, "dim") % rank) != rank - 1:
        return f"a concatenation along axis {argument(node, 'dim')}: expected the last"
    dtypes = {each.meta["val"].dtype for each in parts}
    return "" if dtypes <= {torch.float32, torch.bfloat16} and len(dtypes) == 1 else OTHER_CASE


def _pointwise(node: fx.Node, target: Target) -> str:
    if target.device != "cpu":
        return OTHER_TARGET
    from inferc.codegen.cpp.pointwise import why_not

    return why_not(node)


def _reference(node: fx.Node, target: Target) -> str:
    return "" if target.device == "reference" else OTHER_TARGET


def _triton_silu_mul(node: fx.Node, target: Target) -> str:
    if target.device != "cuda":
        return OTHER_TARGET
    return "" if _dtype(node, "gate") in (torch.float32, torch.bfloat16, torch.float16) else OTHER_CASE


# ----------------------------------------------------------------------------------------------------- table

PANELS = {torch.float32: "panel16_k1", torch.bfloat16: "panel16_k2", torch.int8: "panel16_k4"}

_BIASES = ("gate_up_bias", "down_bias")
# op, name, argument whose dtype decides, weights that are packed, weights that are not, further condition
_CPP_ROWS: tuple[tuple[str, str, str, tuple[str, ...], tuple[str, ...], Callable[[fx.Node], str] | None], ...] = (
    ("aten.embedding", "embedding_panel", "weight", ("weight",), (), _packed_lookup),
    ("aten.embedding", "embedding", "weight", (), ("weight",), _plain_lookup),
    ("aten.linear", "linear", "input", ("weight",), ("bias",), None),
    ("aten.add.Tensor", "add", "self", (), (), _same_shapes),
    ("aten.mul.Tensor", "mul", "self", (), (), _same_shapes),
    ("aten.index_select", "index_select", "self", (), (), _first_axis),
    ("inferc.all_reduce", "all_reduce", "x", (), (), None),
    ("inferc.all_gather", "all_gather", "x", (), (), _last_axis),
    ("inferc.expert_dispatch", "expert_dispatch", "x", (), ("placement",), _ranks_fit),
    ("inferc.expert_combine", "expert_combine", "y", (), ("placement",), _ranks_fit),
    ("inferc.head_linear", "head_linear", "x", ("weight",), (), None),
    ("inferc.linear_wide", "linear_wide", "x", ("weight",), (), None),
    ("inferc.linear_add", "linear_add", "x", ("weight",), ("bias",), None),
    ("inferc.linear_silu_mul", "linear_silu_mul", "x", ("weight",), ("bias",), None),
    ("inferc.layer_norm", "layer_norm", "x", (), ("weight", "bias"), None),
    ("inferc.rms_norm", "rms_norm", "x", (), ("weight",), None),
    ("inferc.rms_norm_add", "rms_norm_add", "x", (), ("weight",), None),
    ("inferc.rope", "rope", "x", (), (), _rope_fits),
    ("inferc.silu_mul", "silu_mul", "gate", (), (), None),
    ("inferc.gelu_mul", "gelu_mul", "gate", (), (), None),
    ("inferc.moe_routing", "moe_routing", "router_logits", (), ("bias",), _routing_fits),
    ("inferc.moe_experts", "moe_experts", "x", ("gate_up", "down"), _BIASES, _float_experts_fit),
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
    ("inferc.rope_kv_write", "rope_kv_write", "q", (), (), _rope_fits),
    ("inferc.norm_rope_kv_write", "norm_rope_kv_write", "q", (), ("q_weight", "k_weight"), _rope_fits),
    (
        *("inferc.qkv_rope_kv_write", "qkv_rope_kv_write", "x", ("weight",)),
        *(_QKV_PLAIN, _float_qkv_fits),
    ),
    ("inferc.paged_attention", "paged_attention", "q", (), ("sinks",), _heads_fit),
    ("inferc.latent_write", "latent_write", "k", (), (), None),
    ("inferc.latent_attention", "latent_attention", "q", (), (), _latents_fit),
)
_SCALES = ("gate_up_scale", "down_scale")
_GROUP_SCALES = ("gate_up_group_scale", "down_group_scale")
# The same with int8 weights, without the argument: the dtype of the first weight decides, and the result's.
_INT8_ROWS: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...], Callable[[fx.Node], str] | None], ...] = (
    ("inferc.embedding_int8", "embedding_panel_int8", ("weight",), ("scale",), _packed_lookup),
    ("inferc.embedding_int8", "embedding_int8", (), ("weight", "scale"), None),
    ("inferc.linear_int8", "linear_int8", ("weight",), ("scale", "bias"), None),
    ("inferc.linear_w8a8", "linear_w8a8", ("weight",), ("scale", "bias"), _int32_holds),
    ("inferc.qkv_rope_kv_write", "qkv_rope_kv_write_int8", ("weight",), ("scale", *_QKV_PLAIN), _int8_qkv_fits),
    ("inferc.qkv_rope_kv_write", "qkv_rope_kv_write_w8a8", ("weight",), ("scale", *_QKV_PLAIN), _w8a8_qkv_fits),
    ("inferc.moe_experts", "moe_experts_int8", ("gate_up", "down"), (*_BIASES, *_SCALES), _int8_experts_fit),
    ("inferc.moe_experts", "moe_experts_w8a8", ("gate_up", "down"), (*_BIASES, *_SCALES), _w8a8_experts_fit),
)
# op, name, weights in four bits, the scales of their groups, what is not packed, condition
_INT4_ROWS: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...], tuple[str, ...], Callable[[fx.Node], str]], ...] = (
    ("inferc.linear_w4a8", "linear_w4a8", ("weight",), ("group_scale",), ("scale", "bias"), _four_bits_fit),
    (
        *("inferc.qkv_rope_kv_write", "qkv_rope_kv_write_w4a8", ("weight",), ("group_scale",)),
        *(("scale", *_QKV_PLAIN), _w4a8_qkv_fits),
    ),
    (
        *("inferc.moe_experts", "moe_experts_w4a8", ("gate_up", "down"), _GROUP_SCALES, (*_BIASES, *_SCALES)),
        _w4a8_experts_fit,
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
            _Cpp(deciding, dtype, check, int8_cache),
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
            _CppIntegers((*packed, *plain)[0], dtype, check, torch.int8, int8_cache),
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
            _CppIntegers(packed[0], dtype, check, torch.uint8, int8_cache),
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
    kernels.append(Kernel("cpp", "aten.cat", "cpp.cat", _cat, "inferc.codegen.cpp.calls:cat"))
    kernels.append(
        Kernel("cpp", "inferc.pointwise", "cpp.pointwise", _pointwise, "inferc.codegen.cpp.pointwise:pointwise")
    )
    ids = _Cpp("expert_ids", torch.int32, lambda node: _at_most("ep rank", argument(node, "rank"), 63))
    positions = _Cpp("self", torch.int64, _first_axis)
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
    table = _Cpp("inv_freq", torch.float32)
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
    | {"inferc.rope_table", "inferc.attention", "inferc.pointwise", "aten.cat"}
    | _COLLECTIVES
)

KERNELS: tuple[Kernel, ...] = (
    *_cpp_kernels(),
    Kernel("triton", "inferc.silu_mul", "triton.silu_mul", _triton_silu_mul, "inferc.codegen.triton.silu_mul:emit"),
    *(Kernel("reference", op, f"reference.{op}", _reference) for op in _REFERENCE_OPS),
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
    return UnsupportedError(
        f"inferc cannot run {op} yet (node {name_of(node)}): this model's family is not supported{on}"
    )


def kernel_named(name: str, kernels: tuple[Kernel, ...] = KERNELS) -> Kernel:
    """The row that a node's `meta["kernel"]` names."""
    for kernel in kernels:
        if kernel.name == name:
            return kernel
    raise UnsupportedError(f"unknown kernel {name!r}; this program was lowered by another version of inferc")


def _sizes(shape: tuple[Any, ...]) -> str:
    return f"[{', '.join(str(size) if isinstance(size, int) else 'T' for size in shape)}]"


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{dtype_name(value.dtype)}{_sizes(tuple(value.shape))}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(_type(item) for item in value) + ")"
    return "?"


def _describe(arg: Any) -> str:
    return _type(arg.meta.get("val")) if isinstance(arg, fx.Node) else repr(arg)
