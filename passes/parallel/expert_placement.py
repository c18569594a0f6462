"""Which ranks hold which experts: evenly, or by how many tokens each expert was seen to get.

An expert that gets more than a rank's share is held by several; its tokens take turns. Loads are counted by running an
artifact: `runtime/measure/expert_loads.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from inferc.errors import ConfigError
from inferc.expert_loads import ExpertLoads

Placement = tuple[tuple[int, ...], ...]  # of each expert, the ranks that hold it


def contiguous(num_experts: int, ep: int) -> Placement:
    """Each expert once, neighbours together."""
    check_ranks(num_experts, ep)
    return tuple((expert * ep // num_experts,) for expert in range(num_experts))


def check_ranks(num_experts: int, ep: int) -> None:
    if not 1 <= ep <= num_experts:
        raise ConfigError(f"--ep {ep}: a layer has {num_experts} experts; use --ep from 1 to {num_experts}")


def balanced(loads: Sequence[float], ep: int, num_redundant: int = 0) -> Placement:
    """Greedily: replicas for the experts with the most load each, then the heaviest to the rank with the least.

    Ranks hold as many experts as one another, or one fewer; `num_redundant` is how many replicas there are besides.
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
    # Experts with many replicas first: they need as many different ranks.
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
    """Give a rank without experts one of the rank that has most."""
    moved = [list(ranks) for ranks in placement]
    for rank in range(ep):
        if not any(rank in ranks for ranks in moved):
            counts = [sum(other in ranks for ranks in moved) for other in range(ep)]
            most = counts.index(max(counts))
            ranks = next(ranks for ranks in moved if most in ranks)
            ranks[ranks.index(most)] = rank
    return tuple(tuple(sorted(ranks)) for ranks in moved)


def rank_loads(placement: Placement, loads: Sequence[float], ep: int) -> list[float]:
    """Tokens that each rank computes, where replicas share theirs evenly."""
    total = [0.0] * ep
    for ranks, load in zip(placement, loads, strict=True):
        for rank in ranks:
            total[rank] += load / len(ranks)
    return total


def placements(loads: ExpertLoads, ep: int, num_redundant: int = 0) -> dict[int, Placement]:
    """A placement for each layer of a profile."""
    return {layer: balanced(counts, ep, num_redundant) for layer, counts in loads.layers.items()}
