import operator
from typing import Any

import pytest
import torch
from graphs import example, random, rows
from torch import ops

from inferc.passes.fuse_moe_routing import fuse_moe_routing, fuse_moe_routing_plain

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


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fuses_the_router(renormalize: bool, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    golden = f"""
        %x: {name}[s0, 8] = input
        %0: {name}[s0, 4] = aten.linear(%x, @gate)
        %1: (int32[s0, 2], float32[s0, 2]) = inferc.moe_routing(%0, 2, {renormalize})
        %2: int32[s0, 2] = getitem(%1, 0)
        %3: float32[s0, 2] = getitem(%1, 1)
        %4: {name}[s0, 8] = inferc.moe_experts(%x, %2, %3, @gate_up, @down)
        return (%4)
    """
    weights = {key: value.to(dtype) for key, value in WEIGHTS.items()}
    made = example(routed(renormalize, dtype), {"x": rows(8, dtype=dtype)}, weights)
    wanted, other = fuse_moe_routing, fuse_moe_routing_plain
    if not renormalize:
        wanted, other = other, wanted
    made.check_untouched(other)
    made.check(wanted, 1, golden, tolerance=1e-5 if dtype == torch.float32 else 0.1)


def test_keeps_a_router_whose_scores_are_returned() -> None:
    def graph(x: Any, gate: Any, gate_up: Any, down: Any) -> Any:
        scores = aten.softmax.int(aten.linear.default(x, gate), -1)
        top = aten.topk.default(scores, 2)
        out = inferc.moe_experts.default(x, operator.getitem(top, 1), operator.getitem(top, 0), gate_up, down)
        return out, scores

    example(graph, {"x": rows(8)}, WEIGHTS).check_untouched(fuse_moe_routing_plain)
