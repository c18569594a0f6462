"""The queue of waiting sequences, in the order in which they are admitted.

Each client has a queue of its own, by level, rank and arrival (see policies.py). Between queues of the same level the
client that has been served the least goes first (VTC: Sheng et al. 2024, "Fairness in Serving Large Language Models").
All that is computed and sampled for a client is counted, and the count of a client that comes back is raised to the
least of the active ones, so that no client saves up time in which it asked for nothing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from inferc.runtime.step.plan import F64, I64
from inferc.runtime.step.sequence import Sequence

MAX_REMEMBERED = 4096  # clients without open sequences whose count is kept


def key_of(seq: Sequence) -> tuple[int, float, int]:
    """Return the key by which the sequences of one client, and all running ones, are ordered."""
    return seq.level, seq.rank, seq.arrival


class WaitingQueue:
    """The queues of waiting sequences, by client, with how much each client was served.

    A client has a number from `open` until it was closed as often.
    served [num_clients] f64: the cost of the tokens of a client's prompts and outputs.
    """

    def __init__(self) -> None:
        self.served: F64 = np.zeros(8)
        self._lines: list[list[Sequence]] = [[] for _ in self.served]
        self._numbers: dict[str, int] = {}
        self._names: list[str] = [""] * len(self.served)
        self._num_open = np.zeros(len(self.served), np.int64)
        self._past: OrderedDict[str, float] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        """Yield all waiting sequences, client by client."""
        return (seq for line in self._lines for seq in line)

    @property
    def num_clients(self) -> int:
        """The number of clients with open sequences."""
        return len(self._numbers)

    def open(self, client: str) -> int:
        """Count one more sequence of a client, and return the client's number."""
        number = self._numbers.get(client)
        if number is None:
            least = min((float(self.served[other]) for other in self._numbers.values()), default=0.0)
            number = int(np.argmin(self._num_open))
            if self._num_open[number]:
                number = len(self._names)
                self._grow()
            self._numbers[client], self._names[number] = number, client
            self.served[number] = max(least, self._past.pop(client, 0.0))
        self._num_open[number] += 1
        return number

    def close(self, number: int) -> None:
        """Count a sequence of a client as ended."""
        self._num_open[number] -= 1
        if not self._num_open[number]:
            name = self._names[number]
            del self._numbers[name]
            self._past[name] = float(self.served[number])
            if len(self._past) > MAX_REMEMBERED:
                self._past.popitem(last=False)

    def _grow(self) -> None:
        more = len(self._names)
        self.served = np.concatenate((self.served, np.zeros(more)))
        self._num_open = np.concatenate((self._num_open, np.zeros(more, np.int64)))
        self._lines += [[] for _ in range(more)]
        self._names += [""] * more

    def charge(self, clients: I64, cost: F64) -> None:
        """Add the cost of a step to the counts of these clients."""
        self.served += np.bincount(clients, cost, len(self.served))

    def add(self, seq: Sequence) -> None:
        insort(self._lines[seq.client], seq, key=key_of)
        self._size += 1

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that is admitted or has ended; call it before its level or rank changes."""
        line = self._lines[seq.client]
        at = bisect_left(line, key_of(seq), key=key_of)
        assert line[at] is seq, "a sequence is not where its rank puts it"
        del line[at]
        self._size -= 1

    def head(self) -> Sequence:
        """Return the sequence that is admitted next."""
        if self.num_clients == 1:
            return next(iter(self))
        heads = [line[0] for line in self._lines if line]
        served = self.served
        return min(heads, key=lambda seq: (seq.level, served[seq.client], seq.rank, seq.arrival))

    def front(self, count: int) -> list[Sequence]:
        """Return the first `count` sequences of each queue, in no order."""
        return [seq for line in self._lines for seq in line[:count]]

    def precedes(self, seq: Sequence, other: Sequence) -> bool:
        """Return whether the client of `seq` has been served no more than that of `other`."""
        return seq.client == other.client or bool(self.served[seq.client] <= self.served[other.client])
