"""Fuse a router in front of its experts into one op over the router's logits.

Families differ in how experts are scored (softmax, sigmoid), what is added for the choice alone, whether groups are
chosen first, and how the weights end (renormalised, scaled, the softmax of the chosen). Each step is read off the
graph, from the experts' weights backwards. The weights stay float32, where some models round them to their dtype.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from inferc.ir.program import Program, arguments, name_of, target_name
from inferc.passes.rewrite import infer_types, no_rewrite

aten, inferc = torch.ops.aten, torch.ops.inferc
CASTS = (aten._to_copy.default,)
VIEWS = (aten.view.default, aten.clone.default, aten._unsafe_view.default, aten.expand.default, aten.unsqueeze.default)
# Scores that are computed from the logits of the chosen experts only.
OF_CHOSEN: dict[Any, str] = {
    aten.softmax.int: "chosen_softmax",
    aten.sigmoid.default: "chosen_sigmoid",
}
# A number up to this one that is added to a sum only prevents a division by 0; it is no parameter of the model.
MAX_EPSILON = 1e-6


class Other(Exception):
    """The error raised for a router that does something else than `inferc.moe_routing`; the message says what."""


@dataclass(frozen=True)
class Routing:
    """The arguments of `inferc.moe_routing`."""

    logits: fx.Node
    bias: fx.Node | None
    top_k: int
    renormalize: bool
    score: str
    scale: float
    num_groups: int = 1
    topk_groups: int = 1
    group_score: str = "max"


@dataclass(frozen=True)
class FuseMoERouting:
    name: str = "fuse_moe_routing"

    def __call__(self, program: Program) -> int:
        count = 0
        for node in program.graph.find_nodes(op="call_function", target=inferc.moe_experts.default, sort=True):
            ids, weights = node.args[1], node.args[2]
            if isinstance(ids.target, type(operator.getitem)) and ids.args[0].target == inferc.moe_routing.default:
                continue
            try:
                routing = _read(ids, weights)
                experts = node.args[3].meta["val"].shape[0]
                _require(routing.logits.meta["val"].shape[1] == experts, f"its router is not for {experts} experts")
            except Other as other:
                no_rewrite(self.name, node, str(other))
                continue
            _rewrite(program, node, routing)
            count += 1
        if count:
            program.drop_unused()
        return count


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise Other(otherwise)


def _through(node: Any, targets: tuple[Any, ...]) -> Any:
    while isinstance(node, fx.Node) and node.target in targets:
        node = node.args[0]
    return node


def _is_part(node: Any, target: Any, index: int) -> bool:
    """Return whether the node takes result `index` of a call of `target`."""
    if not isinstance(node, fx.Node) or node.target is not operator.getitem or node.args[1] != index:
        return False
    source = node.args[0]
    return isinstance(source, fx.Node) and source.target == target


# ------------------------------------------------------------------------------------------------ reading


def _read(ids: fx.Node, weights: fx.Node) -> Routing:
    ids = _through(ids, CASTS)
    _require(_is_part(ids, aten.topk.default, 1), f"its choice is {_what(ids)}, expected topk")
    top = ids.args[0]
    assert isinstance(top, fx.Node)
    choice, top_k, dim, largest, _ = arguments(top)
    _require(bool(largest) and dim == -1, "it chooses the smallest, or along another axis")
    weights, scale = _scaled(_through(weights, CASTS))
    weights, renormalize = _renormalized(weights)
    weights = _through(weights, CASTS)
    of_chosen = OF_CHOSEN.get(weights.target, "")
    if of_chosen:
        weights = _through(weights.args[0], CASTS)
    choice, groups = _grouped(choice)
    scored, bias = _biased(choice)
    if _is_part(weights, aten.topk.default, 0):
        _require(weights.args[0] is top and bias is None, "its weights are of another choice")
    else:
        _require(
            weights.target == aten.gather.default, f"its weights are {_what(weights)}, expected those of the chosen"
        )
        source, _, index, *_ = arguments(weights)
        _require(_through(index, CASTS) is ids and source is scored, "its weights are no scores of the chosen")
    score, logits = _score(scored, of_chosen)
    return replace(groups, logits=logits, bias=bias, top_k=top_k, renormalize=renormalize, score=score, scale=scale)


def _what(node: Any) -> str:
    return target_name(node.target) if isinstance(node, fx.Node) else repr(node)


def _scaled(node: Any) -> tuple[Any, float]:
    if node.target == aten.mul.Tensor and isinstance(node.args[1], (int, float)):
        return _through(node.args[0], CASTS), float(node.args[1])
    return node, 1.0


def _renormalized(node: Any) -> tuple[Any, bool]:
    """Match `weights / sum(weights)`, with or without an epsilon or clamp that keeps the sum from 0."""
    if node.target != aten.div.Tensor:
        return node, False
    weights, total = node.args
    if total.target == aten.add.Tensor and isinstance(total.args[1], float):
        _require(total.args[1] <= MAX_EPSILON, f"{total.args[1]} is added to the weights' sum")
        total = total.args[0]
    elif total.target == aten.clamp.default:
        _, low, high = arguments(total)
        _require(high is None and low <= MAX_EPSILON, "the weights' sum is clamped")
        total = total.args[0]
    is_sum = total.target == aten.sum.dim_IntList and total.args[0] is weights
    _require(is_sum and list(total.args[1]) == [-1], "its weights are divided by something else than their sum")
    return weights, True


def _biased(choice: Any) -> tuple[Any, fx.Node | None]:
    if choice.target == aten.add.Tensor and isinstance(choice.args[1], fx.Node):
        scores, bias, alpha = arguments(choice)
        bias = _through(bias, CASTS)
        _require(alpha == 1 and bias.op == "get_attr", "what is added for the choice is no weight")
        return scores, bias
    return choice, None


def _score(node: Any, of_chosen: str) -> tuple[str, fx.Node]:
    if of_chosen:
        return of_chosen, _through(node, CASTS)
    node = _through(node, CASTS)
    if node.target == aten.sigmoid.default:
        return "sigmoid", _through(node.args[0], CASTS)
    _require(node.target == aten.softmax.int and node.args[1] == -1, f"experts are scored by {_what(node)}")
    return "softmax", _through(node.args[0], CASTS)


def _grouped(choice: Any) -> tuple[Any, Routing]:
    """Return what experts are chosen from, and the groups that limit the choice.

    Experts outside of the best groups are masked.
    """
    none = Routing(choice, None, 0, False, "softmax", 1.0)
    if choice.target != aten.masked_fill.Scalar:
        return choice, none
    scores, mask, value = choice.args
    # The scores of a softmax are positive, so a fill value of 0 masks as well as -inf does.
    _require(value in (-float("inf"), 0.0) and mask.target == aten.bitwise_not.default, "its mask is none of groups")
    marks = _through(mask.args[0], (*CASTS, *VIEWS))
    _require(marks.target == aten.scatter.value, f"its mask is {_what(marks)}, expected marked groups")
    _, _, index, mark = marks.args
    _require(mark == 1 and _is_part(index, aten.topk.default, 1), "its groups are not the best")
    best, topk_groups, *_ = arguments(index.args[0])
    num_groups = int(best.meta["val"].shape[1])
    group_score, grouped = _group_score(best)
    _require(grouped.target == aten.view.default and grouped.args[0] is scores, "groups are scored by other numbers")
    return scores, replace(none, num_groups=num_groups, topk_groups=int(topk_groups), group_score=group_score)


def _group_score(best: Any) -> tuple[str, Any]:
    if _is_part(best, aten.max.dim, 0):
        return "max", best.args[0].args[0]
    if best.target == aten.amax.default:
        return "max", best.args[0]
    inner: Any = best.args[0] if best.target == aten.sum.dim_IntList else None
    two = _is_part(inner, aten.topk.default, 0) and inner.args[0].args[1] == 2
    _require(two, f"groups are scored by {_what(best)}, expected their best or the sum of their two best")
    return "top2_sum", inner.args[0].args[0]


# ------------------------------------------------------------------------------------------------ writing


def _rewrite(program: Program, experts: fx.Node, found: Routing) -> None:
    graph = program.graph
    args: list[Any] = [found.logits, found.bias, found.top_k, found.renormalize]
    extra: list[Any] = [found.score, found.scale, found.num_groups, found.topk_groups, found.group_score]
    defaults = ["softmax", 1.0, 1, 1, "max"]
    while extra and extra[-1] == defaults[len(extra) - 1]:
        extra.pop()
    with graph.inserting_before(experts):
        routing = graph.call_function(inferc.moe_routing.default, (*args, *extra))
        parts = [graph.call_function(operator.getitem, (routing, index)) for index in (0, 1)]
    infer_types(program, [routing, *parts])
    base = f"{name_of(experts)}.moe_routing"
    for node, name in zip((routing, *parts), (base, f"{base}.0", f"{base}.1"), strict=True):
        node.meta.update(name=name, layer=experts.meta.get("layer"))
    experts.args = (experts.args[0], *parts, *experts.args[3:])
