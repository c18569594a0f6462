"""The conditions that several backends' kernels share: each gives a reason why a kernel cannot run a node, or "".

Reasons are texts for people. Conditions read only dtypes, shapes and arguments of the node, which are known when a
model is compiled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from inferc.codegen.kernel import OTHER_CASE
from inferc.ir.ops import cached_head_dim
from inferc.ir.program import argument, target_name

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64)


def dtype_of(node: fx.Node, name: str) -> torch.dtype | None:
    value = argument(node, name)
    value = value.meta.get("val") if isinstance(value, fx.Node) else None
    return value.dtype if isinstance(value, Tensor) else None


def shape_of(node: fx.Node, name: str) -> tuple[Any, ...]:
    return tuple(argument(node, name).meta["val"].shape)


_MULTIPLIES = ("aten.linear", "inferc.lm_head", "inferc.linear_int8", "inferc.linear_w8a8")


def is_tied(node: fx.Node, name: str = "weight", by: tuple[str, ...] = _MULTIPLIES) -> bool:
    """Tell whether another node, with one of the ops `by`, multiplies by the weight that this node reads.

    Such a weight is stored packed, and only once.
    """
    weight = argument(node, name)
    readers = (
        user
        for other in node.graph.nodes
        if other.op == "get_attr" and other.target == weight.target
        for user in other.users
    )
    return any(target_name(user.target) in by for user in readers)


def joined(*reasons: str) -> str:
    """Join the reasons that are not empty into one line."""
    return ", and ".join(reason for reason in reasons if reason)


def at_most(name: str, found: Any, most: int) -> str:
    return f"{name} {found}: expected at most {most}" if found > most else ""


def multiple(name: str, found: Any, of: int) -> str:
    return f"{name} {found}: expected a multiple of {of}" if found % of else ""


def same_shapes(node: fx.Node) -> str:
    other = argument(node, "other")
    if isinstance(other, (int, float)) or shape_of(node, "self") == shape_of(node, "other"):
        return ""
    found = f"{sizes(shape_of(node, 'self'))} and {sizes(shape_of(node, 'other'))}"
    return f"{target_name(node.target)} of {found}: expected equal shapes"


def first_axis(node: fx.Node) -> str:
    dim = argument(node, "dim")
    return "" if dim == 0 else f"axis {dim}: expected rows, which are axis 0"


def last_axis(node: fx.Node) -> str:
    dim, rank = argument(node, "dim"), node.meta["val"].dim()
    return "" if dim % rank == rank - 1 else f"axis {dim}: expected columns, which are the last axis"


def head_dim_fits(dim: int) -> str:
    return f"head_dim {dim}: expected a multiple of 16, at most 512" if dim % 16 or dim > 512 else ""


def heads_fit(node: fx.Node) -> str:
    """Check the limits of attention.h: heads of at most 512 elements, in steps of 16."""
    num_heads, dim = shape_of(node, "q")[1:]
    block_size, num_kv_heads = shape_of(node, "kv_cache")[3:5]
    cached = cached_dim(node)
    if head_dim_fits(dim):
        return head_dim_fits(dim)
    if dim != cached:
        return f"head_dim {dim}: expected that of the values, {cached}"
    if num_heads % num_kv_heads:
        return f"{num_heads} heads on {num_kv_heads} KV heads: expected a whole number on each"
    if argument(node, "alibi") is not None and argument(node, "softcap"):
        return "attention with ALiBi and a softcap: expected one of them"
    return multiple("block_size", block_size, 16)


def routing_fits(node: fx.Node) -> str:
    num_experts = shape_of(node, "router_logits")[1]
    most = at_most("num_experts", num_experts, 1024)
    return joined(most, at_most("top_k", argument(node, "top_k"), num_experts))


def is_common_score(node: fx.Node) -> str:
    """Check that a router has one of the score functions that most models use."""
    score = argument(node, "score")
    return (
        f"routing by {score}: expected one of softmax and sigmoid, of all or of the chosen"
        if score == "near_softmax"
        else ""
    )


def rope_fits(node: fx.Node) -> str:
    name = "x" if target_name(node.target) == "inferc.rope" else "q"
    return at_most("rotary dimension", shape_of(node, "table")[-1], shape_of(node, name)[-1])


def cached_dim(node: fx.Node) -> int:
    return cached_head_dim(argument(node, "kv_cache").meta["val"])


def plain_lookup(node: fx.Node) -> str:
    plain = argument(node, "scale_grad_by_freq") is False and argument(node, "sparse") is False
    return "" if plain else "an embedding with options of training: expected a plain one"


def cache_fits(node: fx.Node, dtype: torch.dtype, in_int8: bool) -> str:
    cache = dtype_of(node, "kv_cache")
    if (cache == torch.int8) != in_int8:
        return OTHER_CASE
    return "" if cache in (torch.int8, dtype) else f"a KV cache of {cache}: expected {dtype}, that of the keys, or int8"


def broadcasts(node: fx.Node) -> str:
    """Check that an input has the shape of the result.

    The backend's ops broadcast by themselves, but an input that the expression does not use would widen nothing.
    """
    shapes, made = [tuple(each.meta["val"].shape) for each in argument(node, "inputs")], tuple(node.meta["val"].shape)
    return (
        ""
        if made in shapes
        else f"inputs of {', '.join(map(sizes, shapes))}: expected one of the result's {sizes(made)}"
    )


def sizes(shape: tuple[Any, ...]) -> str:
    return f"[{', '.join(str(size) if isinstance(size, int) else 'T' for size in shape)}]"


def adapters_fit(node: fx.Node) -> str:
    """Check that a product's rows are of the dtype of the adapters."""
    return "" if dtype_of(node, "x") == dtype_of(node, "adapters") else OTHER_CASE
