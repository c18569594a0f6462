"""Decide which ranks hold which experts: evenly, or by how many tokens each expert was seen to get.

An expert that gets more than a rank's share of the tokens is held by several ranks, and its tokens alternate between
them. Loads are counted by running an artifact: `runtime/measure/expert_loads.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from inferc.cost.expert_loads import ExpertLoads
from inferc.errors import ConfigError

Placement = tuple[tuple[int, ...], ...]  # by expert: the ranks that hold it


def contiguous(num_experts: int, ep: int) -> Placement:
    """Place each expert once, with neighbouring experts on the same rank."""
    check_ranks(num_experts, ep)
    return tuple((expert * ep // num_experts,) for expert in range(num_experts))


def check_ranks(num_experts: int, ep: int) -> None:
    if not 1 <= ep <= num_experts:
        raise ConfigError(f"--ep {ep}: a layer has {num_experts} experts; use --ep from 1 to {num_experts}")


def balanced(loads: Sequence[float], ep: int, num_redundant: int = 0) -> Placement:
    """Place experts greedily by load.

    Replicas go to the experts with the most load per replica; then the heaviest replica goes to the rank with the least
    load. All ranks hold the same number of experts, or one fewer. `num_redundant` is the number of additional replicas.
    """
    num_experts = len(loads)
    check_ranks(num_experts, ep)
    if not 0 <= num_redundant <= num_experts * (ep - 1):
        raise ConfigError(f"{num_redundant} redundant experts: expected 0 to {num_experts * (ep - 1)} on {ep} ranks")
    replicas = [1] * num_experts
    for _ in range(num_redundant):
        hottest = max((e for e in range(num_experts) if replicas[e] < ep), key=lambda e: loads[e] / replicas[e])
        replicas[hottest] += 1
    room = [-(-(num_experts + num_redundant) // ep)] * ep
    held: list[list[int]] = [[] for _ in range(num_experts)]
    total = [0.0] * ep
    # Place experts with many replicas first: they need as many different ranks.
    for expert in sorted(range(num_experts), key=lambda e: (-replicas[e], -loads[e] / replicas[e])):
        share = loads[expert] / replicas[expert]
        for _ in range(replicas[expert]):
            free = [rank for rank in range(ep) if rank not in held[expert]]
            rank = min(free, key=lambda rank: (room[rank] <= 0, total[rank], -room[rank], rank))
            held[expert].append(rank)
            room[rank] -= 1
            total[rank] += share
    return _fill_empty(tuple(tuple(sorted(ranks)) for ranks in held), ep)


def _fill_empty(placement: Placement, ep: int) -> Placement:
    """Move an expert from the rank that has most to each rank without experts."""
    moved = [list(ranks) for ranks in placement]
    for rank in range(ep):
        if not any(rank in ranks for ranks in moved):
            counts = [sum(other in ranks for ranks in moved) for other in range(ep)]
            most = counts.index(max(counts))
            ranks = next(ranks for ranks in moved if most in ranks)
            ranks[ranks.index(most)] = rank
    return tuple(tuple(sorted(ranks)) for ranks in moved)


def placements(loads: ExpertLoads, ep: int, num_redundant: int = 0) -> dict[int, Placement]:
    """Return a balanced placement for each layer of a load profile."""
    return {layer: balanced(counts, ep, num_redundant) for layer, counts in loads.layers.items()}
