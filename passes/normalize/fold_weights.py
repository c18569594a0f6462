"""Fold ops that read weights alone into a weight, which is computed once, when the artifact is written.

These are casts, views, permutations and slices of axes, concatenations of several weights, and elementwise arithmetic
(norms that scale by 1 + w, parameters that are scaled). Each operation is rounded as the graph rounds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from inferc.ir import weights as weight_lib
from inferc.ir.program import Program, arguments, dtype_name, target_name
from inferc.ir.weights import Weight
from inferc.passes.fuse.pointwise import EXPONENTS, OPS, endless_argument, text_of, weight_behind
from inferc.passes.rewrite import no_rewrite

aten = torch.ops.aten
Folded = tuple[str, Weight]  # the last part of the new weight's name, and its expression


@dataclass(frozen=True)
class FoldWeights:
    name: str = "fold_weights"

    def __call__(self, program: Program) -> int:
        count = 0
        for node in list(program.graph.nodes):
            sources = [weight_behind(each) for each in node.all_input_nodes] if node.op == "call_function" else []
            if not sources or any(each.op != "get_attr" for each in sources):
                continue
            value = node.meta["val"]
            if not isinstance(value, Tensor) or not value.dim():
                continue
            folded = _folded(node, [_as_read(program, each) for each in node.all_input_nodes])
            if folded is None:
                no_rewrite(self.name, node, f"{target_name(node.target)} of weights is no arithmetic on their elements")
                continue
            name, weight = f"{sources[0].target}.{folded[0]}", folded[1]
            if program.weights.get(name, weight) != weight:
                name = f"{name}.{node.name}"
            node.replace_all_uses_with(program.add_weight(name, weight, before=node))
            count += 1
        if count:
            program.drop_unused()
        return count


def _as_read(program: Program, node: fx.Node) -> Weight:
    """Return the weight that a node reads, rounded by the casts of a single number that lie between."""
    source, dtypes = weight_behind(node), []
    while node is not source:
        dtypes.append(node.meta["val"].dtype)
        node = node.args[0]  # type: ignore[assignment]
    weight = program.weight(source)
    for dtype in reversed(dtypes):
        weight = weight if weight.dtype == dtype else weight_lib.cast(weight, dtype)
    return weight


def _folded(node: fx.Node, weights: list[Weight]) -> Folded | None:
    """Return the weight that a call on weights alone computes, or None if it cannot be one."""
    rule = RULES.get(node.target)
    if rule is not None:
        return rule(node, weights)
    return _arithmetic(node, weights) if node.target in OPS else None


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(int(size) for size in node.meta["val"].shape)


def _cast(node: fx.Node, weights: list[Weight]) -> Folded:
    dtype = node.meta["val"].dtype
    return dtype_name(dtype), weight_lib.cast(weights[0], dtype)


def _view(node: fx.Node, weights: list[Weight]) -> Folded:
    return "x".join(map(str, _shape(node))), weight_lib.reshape(weights[0], _shape(node))


def _order(node: fx.Node, weights: list[Weight]) -> Folded:
    perm = list(range(len(weights[0].shape)))
    if node.target == aten.permute.default:
        order: Any = node.args[1]
        perm = [int(axis) % len(perm) for axis in order]
    else:
        first, second = (0, 1) if node.target == aten.t.default else (int(axis) for axis in arguments(node)[1:3])
        perm[first], perm[second] = perm[second], perm[first]
    return "_".join(map(str, perm)), weight_lib.permute(weights[0], tuple(perm))


def _part(node: fx.Node, weights: list[Weight]) -> Folded | None:
    _, dim, start, _, step = arguments(node)
    if step != 1:
        return None
    dim, size = dim % len(weights[0].shape), _shape(node)[dim]
    first = int(start or 0)
    first += weights[0].shape[dim] if first < 0 else 0
    return f"{first}:{first + size}", weight_lib.slice_(weights[0], dim, first, first + size)


def _joint(node: fx.Node, weights: list[Weight]) -> Folded | None:
    parts: Any = node.args[0]
    # one weight is joined to itself, or dtypes differ
    if len(parts) != len(weights) or len({weight.dtype for weight in weights}) > 1:
        return None
    if node.target == aten.cat.default:
        return "joined", weight_lib.concat(tuple(weights), int(arguments(node)[1]) % len(_shape(node)))
    if int(arguments(node)[1]) % len(_shape(node)) or len({weight.shape for weight in weights}) > 1:
        return None
    return "stacked", weight_lib.stack(tuple(weights))


def _arithmetic(node: fx.Node, weights: list[Weight]) -> Folded | None:
    """Fold elementwise arithmetic, computed in float32.

    float32 holds every step of 16-bit arithmetic exactly enough to round as torch does.
    """
    dtypes = {node.meta["val"].dtype, *(weight.dtype for weight in weights)}
    if not all(dtype.is_floating_point and dtype.itemsize <= 4 for dtype in dtypes):
        return None
    if node.target == aten.pow.Tensor_Scalar and float(node.args[1]) not in EXPONENTS:  # type: ignore[arg-type]
        return None
    if endless_argument(node) is not None:
        return None
    names = {each: f"x{index}" for index, each in enumerate(node.all_input_nodes)}
    weight = weight_lib.elementwise(tuple(weights), text_of(node, names), node.meta["val"].dtype)
    return (target_name(node.target).split(".")[1], weight) if weight.shape == _shape(node) else None


RULES: dict[Any, Callable[[fx.Node, list[Weight]], Folded | None]] = {
    aten._to_copy.default: _cast,
    **dict.fromkeys((aten.view.default, aten.squeeze.default, aten.squeeze.dim, aten.unsqueeze.default), _view),
    **dict.fromkeys((aten.permute.default, aten.transpose.int, aten.t.default), _order),
    aten.slice.Tensor: _part,
    **dict.fromkeys((aten.cat.default, aten.stack.default), _joint),
}
