"""The group of ranks that are processes, on one machine or several: collectives through torch.distributed.

It imports torch, so it is imported only where ranks run as processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from inferc.errors import InfercError
from inferc.runtime.runners.cpu.collectives import Bytes


class ProcessGroup:
    """One process's side of a torch.distributed group on the CPU; the default group unless `group` is given."""

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self._failed = False
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def all_reduce(self, data: NDArray[np.float32]) -> None:
        self._require_whole()
        dist.all_reduce(torch.from_numpy(data), group=self._group)

    def exchange(self, send: Sequence[Bytes], receive: Sequence[Bytes]) -> None:
        self._require_whole()
        receive[self.rank][:] = send[self.rank]
        waiting = []
        for other in range(self.size):
            if other == self.rank:
                continue
            if len(receive[other]):
                waiting.append(dist.irecv(torch.from_numpy(receive[other]), self._global(other), self._group))
            if len(send[other]):
                # Copied: the data to send may lie in the same buffer in which the other ranks' parts arrive.
                waiting.append(dist.isend(torch.from_numpy(send[other].copy()), self._global(other), self._group))
        for each in waiting:
            assert each is not None
            each.wait()

    def abort(self) -> None:
        """Mark this rank as out of step, so it refuses further calls.

        The other ranks' calls fail at torch's timeout.
        """
        self._failed = True

    def _require_whole(self) -> None:
        if self._failed:
            raise InfercError("an exchange of this group failed before; start its ranks again")

    def _global(self, rank: int) -> int:
        return rank if self._group is None else dist.get_global_rank(self._group, rank)


def send_rows(rows: NDArray[Any], to: int) -> None:
    """Send hidden rows to the process of the next pipeline stage, which knows their shape."""
    dist.send(torch.from_numpy(rows.view(np.uint8)), to)


def receive_rows(rows: NDArray[Any], source: int) -> None:
    """Fill `rows` with what the process of the previous pipeline stage sends."""
    dist.recv(torch.from_numpy(rows.view(np.uint8)), source)
