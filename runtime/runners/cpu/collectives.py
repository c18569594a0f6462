"""What a compiled step exchanges with other ranks, on the host's side (codegen/cpp/kernels/inferc_abi.h).

A `Group` is one rank's side of those it exchanges with: threads of this process here, processes in process_group.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from inferc.errors import InfercError
from inferc.ir.rendezvous import Meeting
from inferc.runtime.runners.cpu import abi

GROUPS = ("tp", "ep")  # by their number in inferc_abi.h
ALL_REDUCE_F32, ALL_REDUCE_BF16, EXCHANGE = range(3)
Bytes = NDArray[np.uint8]


class Group(Protocol):
    """One rank's side of a group. All ranks make the same calls in the same order."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def all_reduce(self, data: NDArray[np.float32]) -> None:
        """The sum of every rank's data, in place."""

    def exchange(self, send: Sequence[Bytes], receive: Sequence[Bytes]) -> None:
        """send[r] goes to rank r, which gets it in its receive[this rank]; sizes agree."""

    def abort(self) -> None:
        """This rank failed: let those who wait for it fail too."""


class LocalGroup:
    """The ranks are threads of this process. Sums are added in the order of ranks."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size, self._meeting = rank, meeting.size, meeting

    def all_reduce(self, data: NDArray[np.float32]) -> None:
        values = self._meeting.exchange(self.rank, data)
        total = values[0].copy()
        for other in values[1:]:
            total += other
        self._meeting.exchange(self.rank, None)  # nobody writes before all have read
        data[:] = total

    def exchange(self, send: Sequence[Bytes], receive: Sequence[Bytes]) -> None:
        for sent, into in zip(self._meeting.exchange(self.rank, send), receive, strict=True):
            into[:] = sent[self.rank]
        self._meeting.exchange(self.rank, None)

    def abort(self) -> None:
        self._meeting.abort()


@dataclass
class Collectives:
    """Answers a step's collectives with the groups of this rank, by name ("tp", "ep").

    A failure cannot leave compiled code as an exception: it is kept, the step's other collectives do nothing, and
    `check` raises it when the step is over.
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
        """Raise what went wrong since the last check."""
        error, self._error = self._error, None
        if error is not None:
            raise InfercError(f"a step's exchange with other ranks failed: {type(error).__name__}: {error}") from error

    def abort(self) -> None:
        """This rank's step failed."""
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


def widened(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bfloat16, as its bits, in float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16, ties to even; a NaN stays one."""
    bits = values.view(np.uint32)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, nearest).astype(np.uint16)


def _parts(what: abi.Exchange, side: str, size: int) -> list[Bytes]:
    """The bytes for each rank, or from each."""
    base = getattr(what, side)
    offsets, sizes = (
        (ctypes.c_int64 * size).from_address(getattr(what, f"{side}_{name}")) for name in ("offsets", "bytes")
    )
    return [_view(base + offset, count) for offset, count in zip(offsets, sizes, strict=True)]


def _view(address: int, num_bytes: int) -> Bytes:
    memory: Any = (ctypes.c_uint8 * num_bytes).from_address(address)
    return np.frombuffer(memoryview(memory), np.uint8)
