import operator
from typing import Any

import pytest
import torch
from graphs import example, random, rows
from torch import ops

from inferc.passes.fuse.moe_routing import FuseMoERouting

aten, inferc = ops.aten, ops.inferc
WEIGHTS = {"gate": random(4, 8), "gate_up": random(4, 12, 8, seed=1), "down": random(4, 8, 6, seed=2)}


def routed(renormalize: bool, dtype: torch.dtype = torch.float32) -> Any:
    """Mixtral's router with renormalize, Qwen3-MoE's without and with."""

    def graph(x: Any, gate: Any, gate_up: Any, down: Any) -> Any:
        logits = aten.linear.default(x, gate)
        if dtype != torch.float32:
            logits = aten._to_copy.default(logits, dtype=torch.float32)
        top = aten.topk.default(aten.softmax.int(logits, -1), 2)
        weights, ids = operator.getitem(top, 0), operator.getitem(top, 1)
        if renormalize:
            weights = aten.div.Tensor(weights, aten.sum.dim_IntList(weights, [-1], True))
        if dtype != torch.float32:
            weights = aten._to_copy.default(weights, dtype=dtype)
        return inferc.moe_experts.default(x, ids, weights, gate_up, down)

    return graph


def tail(x: Any, ids: Any, weights: Any, gate_up: Any, down: Any, dtype: torch.dtype = torch.float32) -> Any:
    return inferc.moe_experts.default(x, ids, aten._to_copy.default(weights, dtype=dtype), gate_up, down)


def golden_of(arguments: str, name: str = "float32", bias: str = "") -> str:
    return f"""
        %x: {name}[s0, 8] = input
        %0: {name}[s0, 4] = aten.linear(%x, @gate)
        %1: (int32[s0, 2], float32[s0, 2]) = inferc.moe_routing(%0, {bias or None}, 2, {arguments})
        %2: int32[s0, 2] = getitem(%1, 0)
        %3: float32[s0, 2] = getitem(%1, 1)
        %4: {name}[s0, 8] = inferc.moe_experts(%x, %2, %3, @gate_up, @down)
        return (%4)
    """


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fuses_the_router(renormalize: bool, dtype: torch.dtype) -> None:
    weights = {key: value.to(dtype) for key, value in WEIGHTS.items()}
    made = example(routed(renormalize, dtype), {"x": rows(8, dtype=dtype)}, weights)
    golden = golden_of(str(renormalize), str(dtype).removeprefix("torch."))
    made.check(FuseMoERouting(), 1, golden, tolerance=1e-5 if dtype == torch.float32 else 0.1)


def chosen_softmax(x: Any, gate: Any, gate_up: Any, down: Any) -> Any:
    """Granite and gpt-oss: the best logits, and the softmax of them."""
    top = aten.topk.default(aten.linear.default(x, gate), 2)
    return tail(x, operator.getitem(top, 1), aten.softmax.int(operator.getitem(top, 0), -1), gate_up, down)


def chosen_sigmoid(x: Any, gate: Any, gate_up: Any, down: Any) -> Any:
    """Llama 4."""
    top = aten.topk.default(aten.linear.default(x, gate), 2)
    return tail(x, operator.getitem(top, 1), aten.sigmoid.default(operator.getitem(top, 0)), gate_up, down)


@pytest.mark.parametrize("graph", [chosen_softmax, chosen_sigmoid])
def test_the_chosen_ones_logits_are_weighed(graph: Any) -> None:
    made = example(graph, {"x": rows(8)}, WEIGHTS)
    made.check(FuseMoERouting(), 1, golden_of(f"False, '{graph.__name__}'"), tolerance=1e-5)


def grouped(choice: Any, groups: int, score: str, dropped: float) -> Any:
    """DeepSeek: experts outside of the best group are dropped from the choice."""
    parted = aten.view.default(choice, [-1, groups, 4 // groups])
    if score == "max":
        best = operator.getitem(aten.max.dim(parted, -1), 0)
    else:
        best = aten.sum.dim_IntList(operator.getitem(aten.topk.default(parted, 2), 0), [-1])
    index = operator.getitem(aten.topk.default(best, 1, -1, True, False), 1)
    marks = aten.scatter.value(aten.zeros_like.default(best), 1, index, 1)
    spread = aten.expand.default(aten.unsqueeze.default(marks, -1), [-1, groups, 4 // groups])
    spread = aten.view.default(aten.clone.default(spread, memory_format=torch.contiguous_format), [-1, 4])
    kept = aten._to_copy.default(spread, dtype=torch.bool)
    return aten.masked_fill.Scalar(choice, aten.bitwise_not.default(kept), dropped)


def test_sigmoid_bias_groups_and_scale() -> None:
    def graph(x: Any, gate: Any, bias: Any, gate_up: Any, down: Any) -> Any:
        scores = aten.sigmoid.default(aten.linear.default(x, gate))
        choice = grouped(aten.add.Tensor(scores, bias), 2, "top2_sum", -float("inf"))
        ids = operator.getitem(aten.topk.default(choice, 2, -1, True, False), 1)
        weights = aten.gather.default(scores, 1, ids)
        total = aten.add.Tensor(aten.sum.dim_IntList(weights, [-1], True), 1e-20)
        return tail(x, ids, aten.mul.Tensor(aten.div.Tensor(weights, total), 2.5), gate_up, down)

    made = example(graph, {"x": rows(8)}, {**WEIGHTS, "bias": random(4, seed=3)})
    made.check(FuseMoERouting(), 1, golden_of("True, 'sigmoid', 2.5, 2, 1, 'top2_sum'", bias="@bias"), tolerance=1e-5)


def test_groups_by_their_best_expert() -> None:
    def graph(x: Any, gate: Any, gate_up: Any, down: Any) -> Any:
        scores = aten.softmax.int(aten.linear.default(x, gate), -1)
        top = aten.topk.default(grouped(scores, 2, "max", 0.0), 2, -1, True, False)
        return tail(x, operator.getitem(top, 1), operator.getitem(top, 0), gate_up, down)

    made = example(graph, {"x": rows(8)}, WEIGHTS)
    made.check(FuseMoERouting(), 1, golden_of("False, 'softmax', 1.0, 2"), tolerance=1e-5)


@pytest.mark.parametrize("what", ["other sum", "other scores", "large epsilon"])
def test_keeps_weights_that_are_no_scores_of_the_chosen(what: str) -> None:
    def graph(x: Any, gate: Any, gate_up: Any, down: Any) -> Any:
        scores = aten.sigmoid.default(aten.linear.default(x, gate))
        ids = operator.getitem(aten.topk.default(scores, 2), 1)
        weights = aten.gather.default(aten.neg.default(scores) if what == "other scores" else scores, 1, ids)
        total = aten.sum.dim_IntList(scores if what == "other sum" else weights, [-1], True)
        total = aten.add.Tensor(total, 0.5) if what == "large epsilon" else total
        return tail(x, ids, aten.div.Tensor(weights, total), gate_up, down)

    example(graph, {"x": rows(8)}, WEIGHTS).check_untouched(FuseMoERouting())
