"""A recorder that observes a lowering and keeps the program's costs after every pass, for `inferc explain`."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import fx

from inferc.cost.formulas import CachedLayers, CostLog, ModelFacts, PassCost
from inferc.cost.ops import program_costs
from inferc.ir.program import MASK_KINDS, Program, target_name


class CostRecorder:
    """An observer of a lowering (an `Observe` of passes.pipeline) that keeps the costs after every pass."""

    def __init__(self) -> None:
        self.rows: list[PassCost] = []
        self.groups: tuple[CachedLayers, ...] = ()
        self.ungrouped = 0
        self.cached = 0  # the bytes per token of the paged KV cache, 0 before there is one

    def __call__(self, _index: int, name: str, rewrites: int, program: Program) -> None:
        nodes = sum(node.op == "call_function" for node in program.graph.nodes)
        groups, ungrouped = _attention_groups(program)
        # A pass may change what will be cached. Once the KV cache is paged, program.kv_groups holds the groups.
        self.groups = groups or self.groups
        if not self.rows:
            self.ungrouped = ungrouped
        cached = sum(group.bytes_per_token for group in program.kv_groups)
        if self.cached and cached != self.cached:  # the cache changed its dtype: scale the ungrouped size likewise
            self.ungrouped = self.ungrouped * cached // self.cached
        self.cached = cached
        before = self.rows[-1].nodes_after if self.rows else nodes
        unchanged = self.rows and not rewrites
        ops = self.rows[-1].ops if unchanged else program_costs(program)
        self.rows.append(PassCost(name, rewrites, before, nodes, ops))

    def log(self, program: Program) -> CostLog:
        """Return the recorded costs, with the facts of the model whose program was lowered."""
        info = program.info
        groups = tuple(
            CachedLayers(
                group.kind, len(group.layers), group.num_kv_heads, group.head_dim, group.window, group.bytes_per_token
            )
            for group in program.kv_groups
        )
        groups = groups or self.groups
        facts = ModelFacts(
            model_type=info.model_type,
            architecture=info.architecture,
            dtype=info.dtype,
            num_layers=program.num_layers,
            num_parameters=info.num_parameters,
            max_model_len=info.max_model_len,
            weights_bytes=sum(weight.num_bytes for weight in set(program.weights.values())),
            kv_groups=groups,
            kv_bytes_per_token=sum(group.bytes_per_token for group in groups),
            kv_bytes_per_token_ungrouped=self.ungrouped,
        )
        return CostLog(facts, self.rows[0], tuple(self.rows[1:]))


def _attention_groups(program: Program) -> tuple[tuple[CachedLayers, ...], int]:
    """Return the KV groups that unpaged attention needs, and the bytes per token without sharing of K and V.

    Without sharing, each query head has K and V of its own.
    """
    found: Counter[tuple[Any, ...]] = Counter()
    ungrouped = 0
    for node in program.graph.nodes:
        if node.op != "call_function" or target_name(node.target) != "inferc.attention":
            continue
        q, k, v, _, _, mask, window = (arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in node.args[:7])
        sizes = int(k.shape[-1]) + int(v.shape[-1])
        axis = 1 if k.dim() == 4 else -2
        found[MASK_KINDS[mask], int(k.shape[axis]), int(k.shape[-1]), int(window), sizes * k.dtype.itemsize] += 1
        ungrouped += int(q.shape[axis]) * sizes * k.dtype.itemsize
    groups = (
        CachedLayers(kind, layers, heads, dim, window, layers * heads * of_head)
        for (kind, heads, dim, window, of_head), layers in found.items()
    )
    return tuple(groups), ungrouped
