"""Fuse rotary position embedding into one table of cosines and sines per step, and one `rope` for each of q and k.

A rotation is recognised by what it computes and not by its spelling (see rotations.py). YaRN's attention factor becomes
the table's `scaling`; the frequency changes of llama3 and YaRN are inside of the constant `inv_freq`. A rotation may
cover only the first part of a head, or a head that is itself a part of another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from inferc.ir import weights as weight_lib
from inferc.ir.program import Program, ancestors, name_of
from inferc.passes.fuse.rotations import Interpreter, Rotation, Terms, rotation
from inferc.passes.rewrite import infer_types, merge_equal, no_rewrite, short_name

aten, inferc = torch.ops.aten, torch.ops.inferc


@dataclass(frozen=True)
class FuseRope:
    """A pass that rewrites each rotation and then keeps one table for all of them."""

    name: str = "fuse_rope"

    def __call__(self, program: Program) -> int:
        known = Interpreter(program.graph).known
        rotated = {node: terms for node, terms in known.items() if terms.source is not None and terms.table is not None}
        covered: set[fx.Node] = set()
        count = 0
        # Go from the end, so that a whole rotation is found before the parts of it.
        for node in reversed(list(rotated)):
            if node in covered or all(user in covered for user in node.users):
                continue
            found = _rotation(program, node, rotated[node])
            if isinstance(found, str):
                no_rewrite(self.name, node, found)
                continue
            _rewrite(program, node, found)
            inner = ancestors([node]) & rotated.keys()
            covered |= {each for each in inner if rotated[each].source is rotated[node].source}
            count += 1
        if count:
            merge_equal(program, inferc.rope_table.default)
            program.drop_unused()
        return count


def _rotation(program: Program, node: fx.Node, terms: Terms) -> Rotation | str:
    value = node.meta["val"]
    if value.dim() != 3:
        return f"it has shape {list(value.shape)}, expected [num_tokens, heads, head_dim]"
    found = rotation(terms, int(value.shape[1]), int(value.shape[2]))
    if isinstance(found, Rotation) and found.is_backwards and not program.weight(found.table.inv_freq).is_constant:
        return "it turns backwards by frequencies that are no constant"
    if isinstance(found, Rotation) and found.source.meta["val"].dtype != value.dtype:
        return f"it makes {value.dtype} of {found.source.meta['val'].dtype}"
    return found


def _negated(program: Program, inv_freq: fx.Node) -> fx.Node:
    """Return the constant of frequencies that turn the other way."""
    name = f"{inv_freq.target}.negative"
    known: list[fx.Node] = [node for node in program.graph.nodes if (node.op, node.target) == ("get_attr", name)]
    if known:
        return known[0]
    value = weight_lib.read_constant(program.weight(inv_freq))
    return program.add_weight(name, weight_lib.constant(-value), before=inv_freq)


def _rewrite(program: Program, node: fx.Node, found: Rotation) -> None:
    graph, made = program.graph, []
    with graph.inserting_before(node):
        x = found.source
        # Heads that are split into pairs were complex numbers.
        if x.meta["val"].dim() != 3:
            heads = int(x.meta["val"].shape[1])
            x = graph.call_function(aten.view.default, (x, [-1, heads, x.meta["val"].shape[2:].numel()]))
            infer_types(program, [x])
            made.append(x)
        if (found.start, found.stop) != (0, x.meta["val"].shape[-1]):
            x = graph.call_function(aten.slice.Tensor, (x, -1, found.start, found.stop))
            made.append(x)
        inv_freq = _negated(program, found.table.inv_freq) if found.is_backwards else found.table.inv_freq
        table = graph.call_function(inferc.rope_table.default, (found.table.positions, inv_freq, found.scaling))
        rope = graph.call_function(inferc.rope.default, (x, table, *([found.pairs] if found.pairs != "halves" else [])))
    made += [table, rope]
    infer_types(program, made)
    for each in made:
        each.meta.update(name=f"{name_of(node)}.{short_name(each)}", layer=node.meta.get("layer"))
    rope.meta["name"] = name_of(node)
    node.replace_all_uses_with(rope)
