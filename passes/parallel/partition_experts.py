"""Place the experts of each layer on `ep` ranks, and exchange tokens between them.

Everything else is replicated, so every rank has all tokens before and after. `exchange` says how experts get them:

- "all_to_all": a rank sends its share of the tokens to the ranks that hold their experts, and gets the results back;
- "all_reduce": each rank computes what its own experts add to every token, and the ranks sum that.

The replica that computes a token is chosen by the token's position, so that results depend neither on the batch nor on
the chunks of a prefill.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from itertools import groupby
from typing import Literal

import torch
from msgspec.structs import replace
from torch import fx

from inferc.errors import ConfigError, UnsupportedError
from inferc.ir import program as program_lib
from inferc.ir import weights as weight_lib
from inferc.ir.program import Program, arguments, name_of
from inferc.ir.weights import Weight
from inferc.passes.parallel.expert_placement import Placement, contiguous
from inferc.passes.rewrite import infer_types

inferc = torch.ops.inferc
GROUP = "ep"
Exchange = Literal["all_to_all", "all_reduce"]


def partition_experts(
    program: Program,
    ep: int,
    placements: Mapping[int, Placement] | None = None,
    exchange: Exchange = "all_to_all",
) -> list[Program]:
    """Return the programs of `ep` ranks; `program` stays as it is.

    placements: by layer; a layer without one has its experts placed evenly, each once.

    Raises UnsupportedError for a program without experts, ConfigError for a placement that does not fit.
    """
    if not list(program.graph.find_nodes(op="call_function", target=inferc.moe_experts.default)):
        raise UnsupportedError(f"--ep {ep}: the model has no experts to place; use --tp")
    _check_layers(program, placements)
    made = []
    for rank in range(ep):
        own = program_lib.from_json(program_lib.to_json(program))
        if ep > 1:
            for node in own.graph.find_nodes(op="call_function", target=inferc.moe_experts.default, sort=True):
                given = (placements or {}).get(node.meta["layer"])
                num_experts = int(arguments(node)[4].meta["val"].shape[0])
                placement = contiguous(num_experts, ep) if given is None else given
                _check(node, placement, num_experts, ep)
                _place(own, node, placement, rank, ep, exchange)
            own.drop_unused()
        own.info = replace(own.info, ep_rank=rank, ep_size=ep)
        made.append(own)
    return made


def _check_layers(program: Program, placements: Mapping[int, Placement] | None) -> None:
    nodes = program.graph.find_nodes(op="call_function", target=inferc.moe_experts.default)
    layers = {node.meta["layer"] for node in nodes}
    if placements and set(placements) != layers:
        given, expected = (", ".join(map(str, sorted(each))) for each in (set(placements), layers))
        raise ConfigError(f"experts are placed for layers {given}; the model has experts in layers {expected}")


def _check(node: fx.Node, placement: Placement, num_experts: int, ep: int) -> None:
    wrong = ""
    if len(placement) != num_experts:
        wrong = f"names {len(placement)} experts; expected {num_experts}"
    elif any(not ranks or len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(ep)) for ranks in placement):
        wrong = f"has an expert on no rank, twice on one, or outside of 0 to {ep - 1}"
    elif {rank for ranks in placement for rank in ranks} != set(range(ep)):
        wrong = f"leaves a rank of {ep} without experts"
    if wrong:
        raise ConfigError(f"{name_of(node)}: the placement {wrong}")


def _place(program: Program, node: fx.Node, placement: Placement, rank: int, ep: int, exchange: Exchange) -> None:
    graph, layer = program.graph, node.meta.get("layer")
    x, ids, weights, *rest = arguments(node)
    held = [expert for expert, ranks in enumerate(placement) if rank in ranks]
    own = [None if each is None else _held(program, each, held, rank, node) for each in rest[:4]]
    most = max(map(len, placement))
    table = torch.tensor([[*ranks, *[-1] * (most - len(ranks))] for ranks in placement], dtype=torch.int32)
    where = program.add_weight(f"{name_of(node)}.placement", weight_lib.constant(table), before=node)
    positions = program.input("positions")
    made: list[fx.Node] = []

    def call(target: object, *args: object, name: str) -> fx.Node:
        with graph.inserting_before(node):
            new = graph.call_function(target, args)  # type: ignore[arg-type]
        new.meta.update(name=f"{name_of(node)}.{name}", layer=layer)
        made.append(new)
        return new

    if exchange == "all_reduce":
        chosen = call(inferc.expert_choose.default, ids, positions, where, rank, name="choose")
        results = call(inferc.moe_experts.default, x, chosen, weights, *own, *rest[4:], name="own")
        out = call(inferc.all_reduce.default, results, GROUP, ep, name="all_reduce")
    else:
        how = (positions, where, GROUP, rank, ep)
        sent = call(inferc.expert_dispatch.default, x, ids, weights, *how, name="dispatch")
        parts = [call(operator.getitem, sent, part, name=f"dispatch.{part}") for part in range(3)]
        results = call(inferc.moe_experts.default, *parts, *own, *rest[4:], name="own")
        out = call(inferc.expert_combine.default, results, ids, *how, name="combine")
    infer_types(program, made)
    node.replace_all_uses_with(out)
    graph.erase_node(node)


def _held(program: Program, stacked: fx.Node, held: list[int], rank: int, before: fx.Node) -> fx.Node:
    """Return the experts in `held` of stacked weights, as one slice per run of neighbouring experts."""
    if stacked.op != "get_attr":
        raise UnsupportedError(f"{name_of(before)}: {name_of(stacked)} is computed; expected stacked weights to place")
    whole = program.weight(stacked)
    runs: list[Weight] = []
    for _, run in groupby(enumerate(held), key=lambda each: each[1] - each[0]):
        experts = [expert for _, expert in run]
        runs.append(weight_lib.slice_(whole, 0, experts[0], experts[-1] + 1))
    return program.add_weight(
        f"{stacked.target}.{GROUP}{rank}", runs[0] if len(runs) == 1 else weight_lib.concat(tuple(runs)), before=before
    )
