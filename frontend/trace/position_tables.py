"""The simplification of position tables: look-ups become embeddings, and rope's tables are computed instead.

A rotation by sines and cosines from a table [positions, 2 * frequencies] is a rotation by positions times frequencies,
which is the form that passes know. The frequencies are read off the table; if they do not reproduce it, it stays.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from inferc.frontend.nodes import Calls, constant_value
from inferc.ir import weights as weight_lib
from inferc.ir.program import Program, name_of

aten = torch.ops.aten
WIDENING = (aten.repeat.default, aten.expand.default, aten.unsqueeze.default, aten.view.default, aten.clone.default)
# Ops that may stand between a table's row and its product with a head.
PASSING = (
    aten._to_copy.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.chunk.default,
    aten.repeat_interleave.self_int,
    aten.stack.default,
    aten.select.int,
    aten.squeeze.dim,
    aten.permute.default,
    aten.transpose.int,
    aten.cat.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    *WIDENING,
)
TOLERANCE = 1e-5


def simplify_position_tables(program: Program) -> int:
    """Write look-ups in tables as embeddings, or for rope's tables as computations, and return how many there were."""
    count = 0
    for node in list(program.graph.nodes):
        found = _lookup(node)
        if found is None:
            continue
        table, index = found
        calls = Calls(program, node)
        made = calls.add(aten.embedding.default, table, index)
        made.meta["name"] = name_of(node)
        if made.meta["val"].dim() > node.meta["val"].dim():
            made = calls.add(aten.view.default, made, [-1, table.meta["val"].shape[1]])
        if made.meta["val"].dtype != node.meta["val"].dtype:  # the table was cast; now its rows are cast instead
            made = calls.add(aten._to_copy.default, made, dtype=node.meta["val"].dtype)
        node.replace_all_uses_with(made)
        count += 1
    for node in list(program.graph.find_nodes(op="call_function", target=aten.embedding.default, sort=True)):
        count += _compute(program, node)
    if count:
        program.drop_unused()
    return count


def _lookup(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return (table, indices) of a look-up that is not written as an embedding, or None."""
    if node.target == aten.index_select.default and node.args[1] == 0:
        table, index = node.args[0], _narrowed(node.args[2])
    elif node.target == aten.index.Tensor and len(node.args[1]) == 1:  # type: ignore[arg-type]
        table, index = node.args[0], node.args[1][0]  # type: ignore[index]
    elif node.target == aten.gather.default and node.args[1] in (1, -2) and node.meta["val"].dim() == 3:
        table, index = _narrowed(node.args[0]), _narrowed(node.args[2])
        index = index if isinstance(index, fx.Node) and index.meta["val"].dim() == 2 else None
    else:
        return None
    if isinstance(table, fx.Node) and table.target == aten._to_copy.default:
        table = table.args[0]
    if not isinstance(table, fx.Node) or not isinstance(index, fx.Node):
        return None
    is_table = table.op == "get_attr" and table.meta["val"].dim() == 2 and table.meta["val"].is_floating_point()
    return (table, index) if is_table and index.meta["val"].dtype == torch.int64 else None


def _narrowed(node: Any) -> Any:
    """Return the node that was only widened by axes and repetitions."""
    while isinstance(node, fx.Node) and node.target in WIDENING:
        node = node.args[0]
    return node


def _compute(program: Program, node: fx.Node) -> bool:
    """Replace rows of a table of sines and cosines, by which heads are multiplied, by their computation."""
    table, index = node.args[0], node.args[1]
    assert isinstance(table, fx.Node) and isinstance(index, fx.Node)
    value = constant_value(program, table)
    if value is None or not _only_multiplies(node):
        return False
    found = _frequencies(value.float())
    if found is None:
        return False
    frequencies, parts = found
    calls = Calls(program, node)
    inv_freq = program.add_weight(f"{table.target}.inv_freq", weight_lib.constant(frequencies), before=node)
    positions = calls.add(aten._to_copy.default, index, dtype=torch.float32)
    angles = calls.add(aten.mul.Tensor, calls.add(aten.unsqueeze.default, positions, -1), inv_freq)
    made = calls.add(aten.cat.default, [calls.add(part, angles) for part in parts], -1)
    if node.meta["val"].dtype != torch.float32:
        made = calls.add(aten._to_copy.default, made, dtype=node.meta["val"].dtype)
    node.replace_all_uses_with(made)
    return True


def _only_multiplies(node: fx.Node) -> bool:
    """Tell whether all uses of the rows are multiplications; rows that are added are an embedding."""
    todo, seen = list(node.users), set()
    while todo:
        user = todo.pop()
        if user in seen:
            continue
        seen.add(user)
        if user.target in PASSING or getattr(user.target, "__name__", "") == "getitem":
            todo += user.users
        elif user.target not in (aten.mul.Tensor, aten.neg.default):
            return False
    return bool(seen)


def _frequencies(table: Tensor) -> tuple[Tensor, tuple[Any, Any]] | None:
    """Return the float32 frequencies of a table of sines and cosines, and the two functions in their order."""
    count, width = table.shape
    if width % 2 or count < 2:
        return None
    first, second = table.double().chunk(2, -1)
    for parts in ((aten.sin.default, aten.cos.default), (aten.cos.default, aten.sin.default)):
        sines, cosines = (first, second) if parts[0] is aten.sin.default else (second, first)
        angle = torch.atan2(sines, cosines)
        row, found = 1, angle[1]
        while 2 * row < count:  # the frequency found so far gives the number of whole turns at twice the row
            row *= 2
            turns = ((found * row - angle[row]) / (2 * math.pi)).round()
            found = (angle[row] + turns * 2 * math.pi) / row
        near = found.float()
        tried = [near, torch.nextafter(near, near + 1), torch.nextafter(near, near - 1)]
        rows = torch.arange(count).float()[:, None]
        errors = torch.stack([((rows * each).sin() - sines).abs().amax(0) for each in tried])
        best = torch.stack(tried).gather(0, errors.argmin(0)[None])[0]
        angles = rows * best
        expected = torch.cat(
            [angles.sin(), angles.cos()] if parts[0] is aten.sin.default else [angles.cos(), angles.sin()], -1
        )
        if (expected - table).abs().max() < TOLERANCE * max(1.0, count / 128):
            return best, parts
    return None
