"""The host's side of the collectives through which compiled steps exchange data between ranks (inferc_abi.h).

A `Group` is one rank's side of a group of ranks. Here the ranks are threads of this process; in process_group.py they
are processes. The C side is in codegen/cpp/kernels/inferc_abi.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from inferc.errors import InfercError
from inferc.ir.rendezvous import Rendezvous
from inferc.runtime.artifact.numpy_dtypes import rounded, widened
from inferc.runtime.runners.cpu import abi

GROUPS = ("tp", "ep")  # index: the group's number in inferc_abi.h
ALL_REDUCE_F32, ALL_REDUCE_BF16, EXCHANGE = range(3)
Bytes = NDArray[np.uint8]


class Group(Protocol):
    """The interface of one rank's side of a group; all ranks make the same calls in the same order."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def all_reduce(self, data: NDArray[np.float32]) -> None:
        """Replace `data` by the sum of every rank's data."""

    def exchange(self, send: Sequence[Bytes], receive: Sequence[Bytes]) -> None:
        """Send send[r] to each rank r, which receives it in its receive[this rank]; the sizes agree."""

    def abort(self) -> None:
        """Report that this rank failed, so that ranks waiting for it fail too."""


class LocalGroup:
    """A group whose ranks are threads of this process; sums are added in the order of the ranks."""

    def __init__(self, rank: int, rendezvous: Rendezvous) -> None:
        self.rank, self.size, self._rendezvous = rank, rendezvous.size, rendezvous

    def all_reduce(self, data: NDArray[np.float32]) -> None:
        values = self._rendezvous.exchange(self.rank, data)
        total = values[0].copy()
        for other in values[1:]:
            total += other
        self._rendezvous.exchange(self.rank, None)  # a barrier: no rank writes before all have read
        data[:] = total

    def exchange(self, send: Sequence[Bytes], receive: Sequence[Bytes]) -> None:
        for sent, into in zip(self._rendezvous.exchange(self.rank, send), receive, strict=True):
            into[:] = sent[self.rank]
        self._rendezvous.exchange(self.rank, None)

    def abort(self) -> None:
        self._rendezvous.abort()


@dataclass
class Collectives:
    """The handler of a step's collectives, which passes them to the groups of this rank by name ("tp", "ep").

    A failure cannot leave compiled code as an exception. It is kept, the remaining collectives of the step do nothing,
    and `check` raises it when the step is over.
    """

    groups: Mapping[str, Group] = field(default_factory=dict)
    _error: Exception | None = field(default=None, init=False)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.groups[name].rank if name in self.groups else 0 for name in GROUPS)

    def __call__(self, _context: Any, op: int, group: int, address: int, count: int) -> None:
        if self._error is not None:
            return
        try:
            self._answer(op, self._group(group), address, count)
        except Exception as error:  # noqa: BLE001  (raised by `check`)
            self._error = error
            self.abort()

    def check(self) -> None:
        """Raise the error that occurred since the last check, if any."""
        error, self._error = self._error, None
        if error is not None:
            raise InfercError(f"a step's exchange with other ranks failed: {type(error).__name__}: {error}") from error

    def abort(self) -> None:
        """Tell the groups that this rank's step failed."""
        for group in self.groups.values():
            group.abort()

    def _group(self, number: int) -> Group:
        found = self.groups.get(GROUPS[number])
        if found is None:
            raise InfercError(f"the step exchanges in group {GROUPS[number]!r}, and this runner has joined none")
        return found

    def _answer(self, op: int, group: Group, address: int, count: int) -> None:
        if op == EXCHANGE:
            what = abi.Exchange.from_address(address)
            parts = [_parts(what, side, group.size) for side in ("send", "receive")]
            group.exchange(*parts)
        elif op == ALL_REDUCE_F32:
            group.all_reduce(_view(address, count * 4).view(np.float32))
        else:
            bits = _view(address, count * 2).view(np.uint16)
            wide = widened(bits)
            group.all_reduce(wide)
            bits[:] = rounded(wide)


def _parts(what: abi.Exchange, side: str, size: int) -> list[Bytes]:
    """Return one view of bytes per rank: what is sent to it, or received from it."""
    base = getattr(what, side)
    offsets, sizes = (
        (ctypes.c_int64 * size).from_address(getattr(what, f"{side}_{name}")) for name in ("offsets", "bytes")
    )
    return [_view(base + offset, count) for offset, count in zip(offsets, sizes, strict=True)]


def _view(address: int, num_bytes: int) -> Bytes:
    memory: Any = (ctypes.c_uint8 * num_bytes).from_address(address)
    return np.frombuffer(memoryview(memory), np.uint8)
