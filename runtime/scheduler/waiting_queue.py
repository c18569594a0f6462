"""Who waits, in the order in which they are let in.

Each client has a line of its own, by level, rank and arrival (see policies.py). Between lines of the same level the
client goes first that has been served the least (VTC: Sheng et al. 2024, "Fairness in Serving Large Language Models"):
what is computed and sampled for it is counted, and one who comes back is counted up to the least of those at work, so
that nobody saves up time in which they asked for nothing.
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
    """What orders sequences of one client, and all running ones."""
    return seq.level, seq.rank, seq.arrival


class WaitingQueue:
    """Lines of waiting sequences, by client, and how much each client was served.

    A client is known by a number from `open` until it was closed as often. served [num_clients] f64: the tokens of its
    prompts and its outputs, by what they cost.
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
        """All that wait, client by client."""
        return (seq for line in self._lines for seq in line)

    @property
    def num_clients(self) -> int:
        """Clients with open sequences."""
        return len(self._numbers)

    def open(self, client: str) -> int:
        """One more sequence of a client; returns the client's number."""
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
        """One sequence of a client has ended."""
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
        """Count what a step did for sequences of these clients."""
        self.served += np.bincount(clients, cost, len(self.served))

    def add(self, seq: Sequence) -> None:
        insort(self._lines[seq.client], seq, key=key_of)
        self._size += 1

    def remove(self, seq: Sequence) -> None:
        """Take one out of the line: it is let in, or has ended. Before its level or rank changes."""
        line = self._lines[seq.client]
        at = bisect_left(line, key_of(seq), key=key_of)
        assert line[at] is seq, "a sequence is not where its rank puts it"
        del line[at]
        self._size -= 1

    def head(self) -> Sequence:
        """Who is let in next."""
        if self.num_clients == 1:
            return next(iter(self))
        heads = [line[0] for line in self._lines if line]
        served = self.served
        return min(heads, key=lambda seq: (seq.level, served[seq.client], seq.rank, seq.arrival))

    def front(self, count: int) -> list[Sequence]:
        """The first `count` of each line, in no order."""
        return [seq for line in self._lines for seq in line[:count]]

    def precedes(self, seq: Sequence, other: Sequence) -> bool:
        """Whether `seq`'s client has been served no more than `other`'s."""
        return seq.client == other.client or bool(self.served[seq.client] <= self.served[other.client])
