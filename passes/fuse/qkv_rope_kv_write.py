"""Fuse the packed projection of q, k and v into the op that rotates them and writes K and V into the cache.

A head is finished where it is computed. This saves one write and one read of [num_tokens, (num_heads + 2 *
num_kv_heads) * head_dim] and one barrier between threads.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from inferc.ir.program import Program, arguments, name_of, named_arguments, target_name
from inferc.passes.rewrite import infer_types, no_rewrite

aten, inferc = torch.ops.aten, torch.ops.inferc
PLAIN, NORMED = inferc.rope_kv_write.default, inferc.norm_rope_kv_write.default
NO_NORM = (None, None, 0.0, 0.0, False)
PROJECTIONS = (
    aten.linear.default,
    inferc.linear_int8.default,
    inferc.linear_w8a8.default,
    inferc.linear_w4a8.default,
)
# Arguments that a quantized projection has besides x, weight and bias; the fused op takes them too.
INTEGERS = ("x_scale", "scale", "group_scale", "dtype")


class Other(Exception):
    """The error raised if the op is not fed by a packed projection of q, k and v; the message says what feeds it."""


@dataclass(frozen=True)
class FuseQKV:
    """The pass that fuses packed q, k and v projections; the pass log shows its `name`."""

    name: str = "fuse_qkv_rope_kv_write"

    def __call__(self, program: Program) -> int:
        count = 0
        for node in list(program.graph.nodes):
            if node.target not in (PLAIN, NORMED):
                continue
            try:
                projection = _projection(node)
            except Other as reason:
                no_rewrite(self.name, node, str(reason))
                continue
            _rewrite(program, node, projection)
            count += 1
        if count:
            program.drop_unused()
        return count


def _projection(node: fx.Node) -> fx.Node:
    """Return the linear whose columns are the heads of q, k and v, side by side and read by nothing else."""
    heads = [_heads(each) for each in arguments(node)[:3]]
    sources = {source for source, _, _ in heads}
    if len(sources) != 1:
        raise Other(f"q, k and v come from {len(sources)} values; expected one packed projection")
    projection = sources.pop()
    if projection.target not in PROJECTIONS:
        raise Other(f"q, k and v come from {name_of(projection)}, {target_name(projection.target)}; expected a linear")
    if named_arguments(projection).get("residual") is not None:
        raise Other(f"{name_of(projection)} adds a residual")
    end = 0
    for name, (_, low, high) in zip("qkv", heads, strict=True):
        if low != end:
            raise Other(f"{name} starts at column {low}; expected {end}, where the part before it ends")
        end = high
    width = int(projection.meta["val"].shape[1])
    if end != width:
        raise Other(f"q, k and v are {end} of the {width} columns of {name_of(projection)}; expected all of them")
    others = [user for user in projection.users if not _leads_only_to(user, node)]
    if others:
        raise Other(f"{name_of(projection)} is also read by {name_of(others[0])}")
    return projection


def _heads(node: object) -> tuple[fx.Node, int, int]:
    """Return the value and the columns [low, high) of it that the heads [num_tokens, heads, head_dim] are a view of."""
    assert isinstance(node, fx.Node)
    if node.target != aten.view.default:
        raise Other(f"{name_of(node)} is {target_name(node.target)}; expected heads of a packed projection")
    columns = node.args[0]
    assert isinstance(columns, fx.Node)
    if columns.target != aten.slice.Tensor:
        raise Other(f"{name_of(columns)} is {target_name(columns.target)}; expected a slice of a packed projection")
    source, dim, low, high, step = arguments(columns)
    assert isinstance(source, fx.Node)
    if source.meta["val"].dim() != 2 or dim not in (1, -1) or step != 1:
        raise Other(f"{name_of(columns)} is not a range of columns")
    width = int(source.meta["val"].shape[1])
    return source, int(low or 0), min(width, width if high is None else int(high))


def _leads_only_to(node: fx.Node, target: fx.Node) -> bool:
    return node is target or (
        node.target in (aten.view.default, aten.slice.Tensor)
        and all(_leads_only_to(user, target) for user in node.users)
    )


def _rewrite(program: Program, node: fx.Node, projection: fx.Node) -> None:
    args = arguments(node)
    norms, rest = (tuple(args[3:8]), args[8:]) if node.target == NORMED else (NO_NORM, args[3:])
    table, cache, slots, layer, pairs = rest
    num_heads = int(args[0].meta["val"].shape[1])
    product = named_arguments(projection)
    x = product["input" if projection.target == aten.linear.default else "x"]
    integers = [product.get(name) for name in INTEGERS] if "scale" in product else []
    with program.graph.inserting_before(node):
        new = program.graph.call_function(
            inferc.qkv_rope_kv_write.default,
            (x, product["weight"], product["bias"], *norms, table, cache, slots, layer, num_heads, pairs, *integers),
        )
    new.meta.update(name=name_of(node), layer=node.meta.get("layer"))
    infer_types(program, [new])
    for user in list(node.users):
        assert user.target is operator.getitem
        user.args = (new, user.args[1])
    program.graph.erase_node(node)
