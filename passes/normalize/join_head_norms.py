"""Join the LayerNorms of single heads into one, in models with one module per head (StableLM 2's q and k norms).

Parts of one value, each normalised by itself and put together again, are one norm whose weight has a row per head. It
needs one kernel instead of one per head, and the rotation and the cache can take its heads unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from inferc.ir import weights as weight_lib
from inferc.ir.program import Program, arguments, name_of, target_name
from inferc.passes.rewrite import infer_types, no_rewrite

aten, inferc = torch.ops.aten, torch.ops.inferc


@dataclass(frozen=True)
class JoinHeadNorms:
    name: str = "join_head_norms"

    def __call__(self, program: Program) -> int:
        count = 0
        for node in list(program.graph.find_nodes(op="call_function", target=aten.cat.default, sort=True)):
            parts: Any = node.args[0]
            if int(arguments(node)[1]) not in (-2, node.meta["val"].dim() - 2):
                continue
            if any(part.target != inferc.layer_norm.default for part in parts):
                continue
            found = _whole(parts)
            if isinstance(found, str):
                no_rewrite(self.name, node, found)
                continue
            _rewrite(program, node, parts, found)
            count += 1
        if count:
            program.drop_unused()
        return count


def _whole(parts: list[fx.Node]) -> fx.Node | str:
    """Return the value whose heads the parts are, in order and all of them; otherwise why they are not."""
    heads: list[fx.Node] = [arguments(part)[0] for part in parts]
    source: Any = heads[0].args[0] if heads[0].args else None
    for index, head in enumerate(heads):
        if head.target != aten.slice.Tensor:
            return f"{name_of(head)} is {target_name(head.target)}, expected a head of a value that all have in common"
        of, dim, start, end, step = arguments(head)
        if of is not source or dim != -2 or (start or 0, end, step) != (index, index + 1, 1):
            return f"{name_of(head)} is no head {index} of {name_of(source)}"
    if source.meta["val"].shape[-2] != len(parts):
        return f"{len(parts)} of {source.meta['val'].shape[-2]} heads of {name_of(source)} are normalised"
    if len({arguments(part)[3] for part in parts}) > 1:
        return "their eps differ"
    for which, what in ((1, "weights"), (2, "biases")):
        each = [arguments(part)[which] for part in parts]
        if any(value is None for value in each) != all(value is None for value in each):
            return f"some have {what} and others have none"
        if any(value is not None and (value.op != "get_attr" or value.meta["val"].dim() != 1) for value in each):
            return f"their {what} are no rows of the checkpoint's"
    whole: fx.Node = source
    return whole


def _rewrite(program: Program, node: fx.Node, parts: list[fx.Node], source: fx.Node) -> None:
    rows = [_stacked(program, node, [arguments(part)[which] for part in parts]) for which in (1, 2)]
    with program.graph.inserting_before(node):
        norm = program.graph.call_function(inferc.layer_norm.default, (source, *rows, arguments(parts[0])[3]))
    norm.meta.update(name=name_of(node), layer=node.meta.get("layer"))
    infer_types(program, [norm])
    node.replace_all_uses_with(norm)


def _stacked(program: Program, node: fx.Node, rows: list[Any]) -> fx.Node | None:
    """Return the parts' weights stacked to [heads, head_dim], or None if they have none."""
    if rows[0] is None:
        return None
    weight = weight_lib.stack(tuple(program.weight(row) for row in rows))
    return program.add_weight(f"{rows[0].target}.stacked", weight, before=node)
