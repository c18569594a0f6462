"""Why a kernel cannot run a node: a reason for people, "" where it can. What the table in kernels.py asks.

Conditions read dtypes, shapes and arguments of the node only, which are known when a model is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from inferc.codegen.cpp.values import CPP_TYPES
from inferc.codegen.pointwise import parts
from inferc.codegen.target import Target
from inferc.ir.ops import cached_head_dim
from inferc.ir.ops.quantize import int4_group
from inferc.ir.program import argument, named_arguments, target_name

OTHER_TARGET = "another target's kernel"
OTHER_CASE = "another kernel's dtype or case"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64)


def _dtype(node: fx.Node, name: str) -> torch.dtype | None:
    value = argument(node, name)
    value = value.meta.get("val") if isinstance(value, fx.Node) else None
    return value.dtype if isinstance(value, Tensor) else None


def _shape(node: fx.Node, name: str) -> tuple[Any, ...]:
    return tuple(argument(node, name).meta["val"].shape)


_MULTIPLIES = ("aten.linear", "inferc.lm_head", "inferc.linear_int8", "inferc.linear_w8a8")


def is_tied(node: fx.Node, name: str = "weight", by: tuple[str, ...] = _MULTIPLIES) -> bool:
    """Whether another node, of these ops, multiplies by this node's weight, which is then stored packed and only once."""
    weight = argument(node, name)
    readers = (
        user
        for other in node.graph.nodes
        if other.op == "get_attr" and other.target == weight.target
        for user in other.users
    )
    return any(target_name(user.target) in by for user in readers)


def _joined(*reasons: str) -> str:
    """The reasons there are, in one line."""
    return ", and ".join(reason for reason in reasons if reason)


def at_most(name: str, found: Any, most: int) -> str:
    return f"{name} {found}: expected at most {most}" if found > most else ""


def _multiple(name: str, found: Any, of: int) -> str:
    return f"{name} {found}: expected a multiple of {of}" if found % of else ""


def same_shapes(node: fx.Node) -> str:
    other = argument(node, "other")
    if isinstance(other, (int, float)) or _shape(node, "self") == _shape(node, "other"):
        return ""
    found = f"{sizes(_shape(node, 'self'))} and {sizes(_shape(node, 'other'))}"
    return f"{target_name(node.target)} of {found}: expected equal shapes"


def first_axis(node: fx.Node) -> str:
    dim = argument(node, "dim")
    return "" if dim == 0 else f"axis {dim}: expected rows, which are axis 0"


def last_axis(node: fx.Node) -> str:
    dim, rank = argument(node, "dim"), node.meta["val"].dim()
    return "" if dim % rank == rank - 1 else f"axis {dim}: expected columns, which are the last axis"


def _head_dim_fits(dim: int) -> str:
    return f"head_dim {dim}: expected a multiple of 16, at most 512" if dim % 16 or dim > 512 else ""


def heads_fit(node: fx.Node) -> str:
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
    if argument(node, "alibi") is not None and argument(node, "softcap"):
        return "attention with ALiBi and a softcap: expected one of them"
    return _multiple("block_size", block_size, 16)


def latents_fit(node: fx.Node) -> str:
    """attention.h: V of at most 512 elements in latents of at most 1024, both in steps of 16."""
    block_size, dim = _shape(node, "kv_cache")[3], _cached_dim(node)
    v_dim = argument(node, "v_dim")
    steps = _joined(_multiple("the latent's size", dim, 16), _multiple("its values' size", v_dim, 16))
    most = _joined(at_most("the latent's size", dim, 1024), at_most("its values' size", v_dim, 512))
    return _joined(steps, most, _multiple("block_size", block_size, 16))


def _experts_fit(node: fx.Node) -> str:
    """moe.h: at most 1024 experts, their inner rows in whole panels."""
    num_experts, both, _ = _shape(node, "gate_up")
    return _joined(
        at_most("num_experts", num_experts, 1024), _multiple("the experts' intermediate_size", both // 2, 16)
    )


def float_experts_fit(node: fx.Node) -> str:
    return _experts_fit(node) if _dtype(node, "down") == _dtype(node, "x") else OTHER_CASE


def int8_experts_fit(node: fx.Node) -> str:
    return OTHER_CASE if _dtype(node, "x") == torch.int8 else _experts_fit(node)


def w8a8_experts_fit(node: fx.Node) -> str:
    if _dtype(node, "x") != torch.int8:
        return OTHER_CASE
    hidden, inter = _shape(node, "down")[1:]
    return _joined(
        _experts_fit(node),
        at_most("hidden_size", hidden, INT32_HOLDS),
        at_most("the experts' intermediate_size", inter, INT32_HOLDS),
    )


def w4a8_experts_fit(node: fx.Node) -> str:
    if _dtype(node, "x") != torch.int8:
        return OTHER_CASE
    hidden, inter = _shape(node, "gate_up")[2] * 2, _shape(node, "down")[2] * 2  # two to a byte
    return _joined(
        _experts_fit(node),
        *(_group_fits(node, each, f"{each}_group_scale") for each in ("gate_up", "down")),
        at_most("hidden_size", hidden, INT4_LONGEST),
        at_most("the experts' intermediate_size", inter, INT4_LONGEST),
    )


def ranks_fit(node: fx.Node) -> str:
    """exchange.h: the ranks of a token are the bits of one word."""
    return at_most("--ep", argument(node, "size"), 64)


INT32_HOLDS = (2**31 - 1) // 127**2
"""Products of at most 127 x 127 that a sum of Dot<i8> in simd.h may have."""
INT4_LONGEST = 1 << 16
"""Of k in four bits: scales of groups are then at least five bits, see `ops.quantize.largest_group_scale`."""


def int32_holds(node: fx.Node) -> str:
    return at_most("in_features", _shape(node, "weight")[1], INT32_HOLDS)


def routing_fits(node: fx.Node) -> str:
    num_experts = _shape(node, "router_logits")[1]
    most = at_most("num_experts", num_experts, 1024)
    return _joined(most, at_most("top_k", argument(node, "top_k"), num_experts))


def is_common_score(node: fx.Node) -> str:
    """Why a router does not fit a backend that has the scores that most models use."""
    score = argument(node, "score")
    return (
        f"routing by {score}: expected one of softmax and sigmoid, of all or of the chosen"
        if score == "near_softmax"
        else ""
    )


def common_routing_fits(node: fx.Node) -> str:
    """Why a kernel with the scores that most models use cannot route so: the score, or how many experts there are."""
    return _joined(routing_fits(node), is_common_score(node))


def rope_fits(node: fx.Node) -> str:
    name = "x" if target_name(node.target) == "inferc.rope" else "q"
    return at_most("rotary dimension", _shape(node, "table")[-1], _shape(node, name)[-1])


def _cached_dim(node: fx.Node) -> int:
    return cached_head_dim(argument(node, "kv_cache").meta["val"])


def _heads_are_panels(node: fx.Node) -> str:
    """kv.h: a head is whole panels, and what it is rotated in lies on the stack."""
    head_dim = _cached_dim(node)
    return _joined(_head_dim_fits(head_dim), at_most("rotary dimension", _shape(node, "table")[-1], head_dim))


def without_scale(node: fx.Node) -> str:
    return "" if argument(node, "scale") is None else OTHER_CASE


def float_qkv_fits(node: fx.Node) -> str:
    return _heads_are_panels(node) if argument(node, "scale") is None else OTHER_CASE


def int8_qkv_fits(node: fx.Node) -> str:
    return _heads_are_panels(node) if argument(node, "x_scale") is None else OTHER_CASE


def w8a8_qkv_fits(node: fx.Node) -> str:
    return OTHER_CASE if argument(node, "x_scale") is None else _joined(_heads_are_panels(node), int32_holds(node))


def w4a8_qkv_fits(node: fx.Node) -> str:
    return _joined(_heads_are_panels(node), four_bits_fit(node))


def packed_lookup(node: fx.Node) -> str:
    return "" if is_tied(node) else OTHER_CASE


def plain_lookup(node: fx.Node) -> str:
    plain = argument(node, "scale_grad_by_freq") is False and argument(node, "sparse") is False
    return "" if plain else "an embedding with options of training: expected a plain one"


def four_bits_fit(node: fx.Node) -> str:
    return _joined(_group_fits(node, "weight", "group_scale"), at_most("k", _shape(node, "x")[1], INT4_LONGEST))


def _group_fits(node: fx.Node, weight: str, group_scale: str) -> str:
    group = int4_group(argument(node, weight).meta["val"], argument(node, group_scale).meta["val"])
    return "" if group in (32, 64, 128) else f"weights in groups of {group}: expected 32, 64 or 128"


@dataclass(frozen=True)
class ForCpp:
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
class ForCppIntegers:
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


def cat_fits(node: fx.Node, target: Target) -> str:
    if target.device != "cpu":
        return OTHER_TARGET
    parts: Any = node.args[0]
    rank = node.meta["val"].dim()
    if (argument(node, "dim") % rank) != rank - 1:
        return f"a concatenation along axis {argument(node, 'dim')}: expected the last"
    dtypes = {each.meta["val"].dtype for each in parts}
    return "" if dtypes <= {torch.float32, torch.bfloat16} and len(dtypes) == 1 else OTHER_CASE


def pointwise_fits(node: fx.Node, target: Target) -> str:
    if target.device != "cpu":
        return OTHER_TARGET
    inputs: Any = node.args[0]
    strange = [each.meta["val"].dtype for each in (*inputs, node) if each.meta["val"].dtype not in CPP_TYPES]
    if strange:
        return f"elementwise arithmetic on {strange[0]}: expected {', '.join(map(str, CPP_TYPES))}"
    return "" if parts(node) else "elementwise arithmetic whose operands repeat in two ways"


@dataclass(frozen=True)
class ForOnnx:
    """Why not, of what is written as ONNX ops: it is for that target, and `check` has no reason either.

    has_own: of onnxruntime's own ops among them, which `onnx:standard` leaves out. on_cpu: ops whose weights lie as its CPU
    kernels read them alone.
    """

    check: Callable[[fx.Node], str] | None = None
    has_own: bool = False
    on_cpu: bool = False

    def __call__(self, node: fx.Node, target: Target) -> str:
        if target.device != "onnx":
            return OTHER_TARGET
        if (self.has_own and target.is_standard) or (self.on_cpu and target.spec == "onnx:cuda"):
            return OTHER_CASE
        return "" if self.check is None else self.check(node)


def broadcasts(node: fx.Node) -> str:
    """The ops broadcast by themselves, but what an expression does not use widens nothing."""
    shapes, made = [tuple(each.meta["val"].shape) for each in argument(node, "inputs")], tuple(node.meta["val"].shape)
    return (
        ""
        if made in shapes
        else f"inputs of {', '.join(map(sizes, shapes))}: expected one of the result's {sizes(made)}"
    )


def nbits_block(k: int) -> int:
    """How many neighbours along k are a block of onnxruntime's MatMulNBits: the largest power of two that divides, to 128."""
    return min(128, k & -k)


def is_multiplied_as_integers(node: fx.Node) -> str:
    """Of a table in int8: a product of rows in integers reads it too."""
    return "" if is_tied(node, by=("inferc.linear_w8a8",)) else OTHER_CASE


def blocks_fit(node: fx.Node) -> str:
    """Of int8 weights [n, k]: for kernels that take k in blocks, of 16 at least."""
    return "" if nbits_block(int(argument(node, "weight").meta["val"].shape[1])) >= 16 else OTHER_CASE


def float_experts(node: fx.Node) -> str:
    is_float = all(argument(node, name) is None for name in ("gate_up_scale", "down_scale", "x_scale"))
    return "" if is_float else OTHER_CASE


def _is_swiglu(node: fx.Node) -> bool:
    """As onnxruntime's MoE and QMoE: SwiGLU of gate and up, no scaled input."""
    is_its = argument(node, "activation") in ("silu", "swiglu_clamped") and not argument(node, "scale_input")
    return is_its and _dtype(node, "x") in (torch.float32, torch.float16)


def moe_fits(node: fx.Node) -> str:
    return float_experts(node) or ("" if _is_swiglu(node) else OTHER_CASE)


def int8_experts(node: fx.Node) -> str:
    return "" if _dtype(node, "gate_up") == torch.int8 and argument(node, "x_scale") is None else OTHER_CASE


def int4_experts(node: fx.Node) -> str:
    return "" if _dtype(node, "gate_up") == torch.uint8 and argument(node, "x_scale") is None else OTHER_CASE


def qmoe_int8_fits(node: fx.Node) -> str:
    return int8_experts(node) or ("" if _is_swiglu(node) else OTHER_CASE)


def qmoe_int4_fits(node: fx.Node) -> str:
    """Groups that are whole: QMoE reads no padding."""
    if reason := int4_experts(node):
        return reason
    k = (int(argument(node, "gate_up").meta["val"].shape[1]) // 2, int(node.meta["val"].shape[1]))
    packed = (argument(node, name).meta["val"] for name in ("down", "gate_up"))
    are_whole = all(2 * int(each.shape[2]) == size for each, size in zip(packed, k, strict=True))
    return "" if are_whole and _is_swiglu(node) else OTHER_CASE


def tensorrt_only(node: fx.Node, target: Target) -> str:
    return "" if target.device == "tensorrt" else OTHER_TARGET


def tensorrt_routing(node: fx.Node, target: Target) -> str:
    """Why TensorRT cannot route so: the target is another, or the score is one that few models use."""
    return tensorrt_only(node, target) or is_common_score(node)


def tensorrt_lookup(node: fx.Node, target: Target) -> str:
    return tensorrt_only(node, target) or plain_lookup(node)


def tensorrt_pointwise_fits(node: fx.Node, target: Target) -> str:
    return tensorrt_only(node, target) or broadcasts(node)


def tensorrt_experts_fit(node: fx.Node, target: Target) -> str:
    """Weights in floats, or in int8 with a scale for each output."""
    special = ("x_scale", "gate_up_group_scale", "down_group_scale")
    fits = all(argument(node, name) is None for name in special)
    return tensorrt_only(node, target) or ("" if fits else OTHER_CASE)


def tensorrt_packed_lookup(node: fx.Node, target: Target) -> str:
    return tensorrt_only(node, target) or _multiple("hidden_size", _shape(node, "weight")[1], 4)


def tensorrt_fp8(node: fx.Node, target: Target) -> str:
    return tensorrt_only(node, target) or ("" if target.has_fp8 else OTHER_CASE)


LARGEST_FUSED_HEAD = 256


def tensorrt_fuses(node: fx.Node, target: Target) -> str:
    """TensorRT's fused attention: 16 bits, heads of at most 256 in steps of 8, keys as large as values, nothing special."""
    if target.device != "tensorrt":
        return OTHER_TARGET
    head_dim, v_dim = _shape(node, "q")[2], _shape(node, "v_cache")[3]
    is_plain = argument(node, "sinks") is None and not argument(node, "softcap")
    in_16_bits = _dtype(node, "q") in (torch.bfloat16, torch.float16) and _dtype(node, "q") == _dtype(node, "k_cache")
    fits = head_dim == v_dim and head_dim % 8 == 0 and head_dim <= LARGEST_FUSED_HEAD
    return "" if is_plain and in_16_bits and fits else OTHER_CASE


def reference_only(node: fx.Node, target: Target) -> str:
    return "" if target.device == "reference" else OTHER_TARGET


@dataclass(frozen=True)
class ForTriton:
    """Why not, of a Triton kernel: it is for NVIDIA GPUs, `argument` is of floats, all weights are in its dtype, and `check`
    has no reason either.

    uses_cache: K and V are stored in that dtype too. mixed: weights may be in other dtypes.
    """

    argument: str
    check: Callable[[fx.Node], str] | None = None
    uses_cache: bool = False
    mixed: bool = False

    def __call__(self, node: fx.Node, target: Target) -> str:
        if target.device != "cuda":
            return OTHER_TARGET
        dtype = _dtype(node, self.argument)
        if dtype not in FLOATS:
            return OTHER_CASE
        slopes = named_arguments(node).get("alibi")  # are float32 in every model
        for weight in (each for each in node.all_input_nodes if each.op == "get_attr" and each is not slopes):
            if not self.mixed and (found := weight.meta["val"].dtype) != dtype:
                return f"weight {weight.target} in {found}: expected {dtype}, as {self.argument}"
        reason = _cache_fits(node, dtype, _dtype(node, "kv_cache") == torch.int8) if self.uses_cache else ""
        return reason or ("" if self.check is None else self.check(node))


def one_row_each(node: fx.Node) -> str:
    """A norm of whole rows, not of the heads in them."""
    rank = len(_shape(node, "x"))
    return "" if rank == 2 else OTHER_CASE


def heads_of_rows(node: fx.Node) -> str:
    """A norm of the heads of rows."""
    rank = len(_shape(node, "x"))
    return OTHER_CASE if rank == 2 else "" if rank == 3 else f"rank {rank}: expected rows, or heads of rows"


def lookup_by_position(node: fx.Node) -> str:
    """A lookup by positions, which are wider than token ids."""
    return plain_lookup(node) if _dtype(node, "indices") == torch.int64 else OTHER_CASE


def sum_is_unread(node: fx.Node) -> str:
    """Whether nothing takes the second result, which then has no place."""
    read = any(target_name(user.target) == "getitem" and user.args[1] == 1 for user in node.users)
    return OTHER_CASE if read else ""


def triton_gated_fits(node: fx.Node) -> str:
    """Weights as rows have them, or in int8 with a scale for each output; biases as rows have them."""
    stored, rows, bias = _dtype(node, "weight"), _dtype(node, "x"), _dtype(node, "bias")
    if stored != (rows if argument(node, "scale") is None else torch.int8) or bias not in (None, rows):
        return f"gate and up in {stored}, a bias in {bias}: expected {rows}, as rows are, or weights in int8"
    return ""


def triton_qkv_fits(node: fx.Node) -> str:
    """Weights as rows have them, or in int8 with a scale for each output; K and V are stored as rows are."""
    stored, rows, cache = _dtype(node, "weight"), _dtype(node, "x"), _dtype(node, "kv_cache")
    if argument(node, "x_scale") is not None or stored not in (rows, torch.int8):
        return f"a projection in {stored}, of rows in {rows}: expected both alike, or int8"
    return rope_dims_fit(node) if cache == rows else f"a KV cache of {cache}: expected {rows}, as rows are"


def rope_dims_fit(node: fx.Node) -> str:
    """An even head, of which no more than all is rotated."""
    dim = int(argument(node, "kv_cache").meta["val"].shape[-1])
    return (
        f"head_dim {dim}: expected an even one"
        if dim % 2
        else at_most("rotary dimension", _shape(node, "table")[-1], dim)
    )


def grouped_experts_fit(node: fx.Node) -> str:
    """Weights as rows have them, or all in int8; biases as rows have them."""
    rows, stored = _dtype(node, "x"), _dtype(node, "down")
    of_biases = {_dtype(node, name) for name in ("gate_up_bias", "down_bias")} - {None, rows}
    if stored not in (rows, torch.int8) or _dtype(node, "gate_up") != stored or of_biases:
        return f"experts in {_dtype(node, 'gate_up')} and {stored}: expected {rows}, as the rows, or int8"
    return at_most("num_experts", _shape(node, "down")[0], 1024)


def triton_pointwise_fits(node: fx.Node, target: Target) -> str:
    if target.device != "cuda":
        return OTHER_TARGET
    inputs: Any = node.args[0]
    strange = [each.meta["val"].dtype for each in inputs if each.meta["val"].dtype not in (*FLOATS, *INTEGERS)]
    if strange or node.meta["val"].dtype not in FLOATS:
        return f"elementwise arithmetic on {(*strange, node.meta['val'].dtype)[0]}: expected floats"
    too_many = at_most("inputs of elementwise arithmetic:", len(inputs), 8)
    return too_many or ("" if parts(node) else "elementwise arithmetic whose operands repeat in two ways")


def sizes(shape: tuple[Any, ...]) -> str:
    return f"[{', '.join(str(size) if isinstance(size, int) else 'T' for size in shape)}]"
