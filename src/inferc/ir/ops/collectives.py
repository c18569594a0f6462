"""The reference ops of collectives: sums, shards of columns, and the tokens of experts.

A rank's program names the group it exchanges in ("tp" or "ep"); the other ranks are known only when it runs. The
references find them in `joined`, a context that holds one `Group` per name; `run_ranks` joins the ranks of one process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from inferc.errors import InfercError
from inferc.ir.ops.registry import define, like_first
from inferc.ir.rendezvous import Rendezvous

Result = TypeVar("Result")


class Group(Protocol):
    """The view that one rank has of a group of ranks."""

    rank: int
    size: int

    def exchange(self, value: Any) -> list[Any]:
        """Return every rank's `value`, by rank; all ranks call this in the same order."""


_GROUPS: ContextVar[Mapping[str, Group] | None] = ContextVar("groups", default=None)


@contextmanager
def joined(groups: Mapping[str, Group]) -> Iterator[None]:
    """Run the collectives of this thread with `groups`, which maps the groups' names to their members."""
    token = _GROUPS.set(groups)
    try:
        yield
    finally:
        _GROUPS.reset(token)


def _exchange(group: str, size: int, value: Any) -> list[Any]:
    if size == 1:
        return [value]
    found = (_GROUPS.get() or {}).get(group)
    if found is None or found.size != size:
        there = "none is joined" if found is None else f"one of {found.size} is joined"
        raise InfercError(f"a collective of group {group!r} needs {size} ranks and {there}; run all ranks' programs")
    return found.exchange(value)


# ------------------------------------------------------------------------------------------- in one process


class _Thread:
    """The view that one thread has of a group of threads."""

    def __init__(self, rank: int, rendezvous: Rendezvous) -> None:
        self.rank, self.size, self._rendezvous = rank, rendezvous.size, rendezvous

    def exchange(self, value: Any) -> list[Any]:
        return self._rendezvous.exchange(self.rank, value)


def run_ranks(group: str, functions: Sequence[Callable[[], Result]]) -> list[Result]:
    """Run one function per rank, each on a thread joined to `group`; return the results by rank.

    The threads run in lockstep at collectives. Raises what the first rank to fail raised.
    """
    rendezvous = Rendezvous(len(functions))
    results: list[Any] = [None] * len(functions)
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            with joined({**(_GROUPS.get() or {}), group: _Thread(rank, rendezvous)}):
                results[rank] = functions[rank]()
        except threading.BrokenBarrierError as error:  # another rank failed first, and says why
            errors.append(error)
        except BaseException as error:  # noqa: BLE001  (raised again in the caller's thread)
            errors.insert(0, error)
            rendezvous.abort()

    threads = [
        threading.Thread(target=copy_context().run, args=(work, rank), name=f"{group}-{rank}")
        for rank in range(len(functions))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


# ---------------------------------------------------------------------------------------------------- ops


@define("all_reduce(Tensor x, str group, int size) -> Tensor", like_first)
def all_reduce(x: Tensor, group: str, size: int) -> Tensor:
    """Return the sum of every rank's x, added in the order of ranks in float32 and rounded once.

    x has the same shape and dtype on all ranks.
    """
    values: list[Tensor] = _exchange(group, size, x)
    total = values[0].float().clone()
    for other in values[1:]:
        total += other.float()
    return total.to(x.dtype)


def _all_gather_fake(x: Tensor, _group: str, _rank: int, sizes: list[int], dim: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = sum(sizes)
    return x.new_empty(shape)


@define("all_gather(Tensor x, str group, int rank, int[] sizes, int dim) -> Tensor", _all_gather_fake)
def all_gather(x: Tensor, group: str, rank: int, sizes: list[int], dim: int) -> Tensor:
    """Return every rank's x side by side along `dim`, by rank.

    x has sizes[rank] elements along `dim`; the sizes need not be equal. Raises InfercError for another size.
    """
    if x.shape[dim] != sizes[rank]:
        raise InfercError(f"all_gather: rank {rank} has {x.shape[dim]} along axis {dim}; expected {sizes[rank]}")
    return torch.cat(_exchange(group, len(sizes), x), dim)


# ------------------------------------------------------------------------------------------------ experts


def _targets(expert_ids: Tensor, positions: Tensor, placement: Tensor) -> Tensor:
    """Return the rank that computes each choice of each token, [num_tokens, top_k].

    Among an expert's replicas the token's position decides, so that a result's order of additions depends neither on
    the batch nor on the chunks of a prompt.
    """
    ids = expert_ids.long()
    replicas = (placement >= 0).sum(1)
    turn = positions.long()[:, None] % replicas[ids]
    return placement[ids, turn]


def _local(expert_ids: Tensor, targets: Tensor, placement: Tensor, rank: int) -> Tensor:
    """Return the choices that `rank` computes as indices of its own experts, -1 for the others.

    A rank's experts are ordered by rising id.
    """
    held = (placement == rank).any(1)
    index = held.long().cumsum(0) - 1
    return torch.where(targets == rank, index[expert_ids.long()], -1).to(torch.int32)


def _owners(num_tokens: int, size: int) -> Tensor:
    """Return the rank that sends and sums each token; each rank has a contiguous share of the rows."""
    return torch.arange(num_tokens) * size // max(num_tokens, 1)


@define(
    "expert_choose(Tensor expert_ids, Tensor positions, Tensor placement, int rank) -> Tensor",
    lambda expert_ids, *_: torch.empty_like(expert_ids),
)
def expert_choose(expert_ids: Tensor, positions: Tensor, placement: Tensor, rank: int) -> Tensor:
    """Return `expert_ids` as indices of this rank's experts, -1 for choices that another rank computes.

    expert_ids [num_tokens, top_k] i32; positions [num_tokens]; placement [num_experts, max_replicas] i32: the ranks
    that hold an expert, then -1. A rank's experts are ordered by rising id.
    """
    return _local(expert_ids, _targets(expert_ids, positions, placement), placement, rank)


def _dispatch_fake(x: Tensor, expert_ids: Tensor, weights: Tensor, *_args: object) -> tuple[Tensor, Tensor, Tensor]:
    return like_first(x), like_first(expert_ids), like_first(weights)


@define(
    "expert_dispatch(Tensor x, Tensor expert_ids, Tensor expert_weights, Tensor positions, Tensor placement, str group,"
    " int rank, int size) -> (Tensor, Tensor, Tensor)",
    _dispatch_fake,
)
def expert_dispatch(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    positions: Tensor,
    placement: Tensor,
    group: str,
    rank: int,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Send the tokens of each rank's share to the ranks that hold their experts (all-to-all).

    x [num_tokens, hidden_size], equal on all ranks; the other arguments as in `expert_choose`. Returns what arrived, in
    the order of tokens: rows of x, local expert ids and weights. A token arrives once, however many of its experts are
    here, so num_tokens rows are enough; unused rows are zero, with ids -1.
    """
    targets, owners = _targets(expert_ids, positions, placement), _owners(len(x), size)
    parcels = []
    for to in range(size):
        rows = torch.where((owners == rank) & (targets == to).any(1))[0]
        local = _local(expert_ids[rows], targets[rows], placement, to)
        parcels.append((x[rows], local, expert_weights[rows]))
    arrived = [sent[rank] for sent in _exchange(group, size, parcels)]
    results = (torch.zeros_like(x), torch.full_like(expert_ids, -1), torch.zeros_like(expert_weights))
    for part, result in enumerate(results):
        rows = torch.cat([parcel[part] for parcel in arrived])
        result[: len(rows)] = rows
    return results


@define(
    "expert_combine(Tensor y, Tensor expert_ids, Tensor positions, Tensor placement, str group, int rank, int size)"
    " -> Tensor",
    like_first,
)
def expert_combine(
    y: Tensor, expert_ids: Tensor, positions: Tensor, placement: Tensor, group: str, rank: int, size: int
) -> Tensor:
    """Return the experts' results to the rank that sent each token, sum them there in float32, and gather all rows.

    This undoes `expert_dispatch`. y [num_tokens, hidden_size]: the results of the rows that arrived, in that order; the
    other arguments as they were dispatched. Every rank returns the finished rows of all ranks, [num_tokens,
    hidden_size].
    """
    targets, owners = _targets(expert_ids, positions, placement), _owners(len(y), size)
    here = torch.where((targets == rank).any(1))[0]  # the token of each row that arrived
    parcels = [y[: len(here)][owners[here] == to] for to in range(size)]
    out = torch.zeros(y.shape, dtype=torch.float32)
    for sender, sent in enumerate(_exchange(group, size, parcels)):
        rows = torch.where((owners == rank) & (targets == sender).any(1))[0]
        out.index_add_(0, rows, sent[rank].float())
    finished = _exchange(group, size, out[owners == rank])
    return torch.cat(finished).to(y.dtype)
