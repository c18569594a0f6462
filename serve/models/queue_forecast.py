"""How long a request would wait for its first token, by how fast others have got theirs: so that who would wait in vain is
told at once."""

from __future__ import annotations

from collections import deque
from contextvars import ContextVar

WINDOW_SECONDS = 10.0
MOST_FIRSTS = 4096  # first tokens that are remembered
# Seconds that the call which runs has left, where its client said so.
WITHIN: ContextVar[float | None] = ContextVar("WITHIN", default=None)


# When the call that runs came to the server, on the monotonic clock.
ARRIVED_AT: ContextVar[float | None] = ContextVar("ARRIVED_AT", default=None)


class QueueForecast:
    """Counts sequences that wait for a first token, and how fast first tokens come while any do. Times in seconds."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self._since = 0.0  # somebody waits
        self._firsts: deque[float] = deque(maxlen=MOST_FIRSTS)

    def came(self, count: int, now: float) -> None:
        if not self.num_waiting:
            self._since = now
            self._firsts.clear()
        self.num_waiting += count

    def first_token(self, now: float) -> None:
        self.num_waiting -= 1
        self._firsts.append(now)

    def left(self, count: int) -> None:
        """Sequences went that had no token."""
        self.num_waiting -= count

    def seconds(self, now: float, num_running: int = 0) -> float:
        """Until a sequence that came now would get its first token: at the rate of the last seconds, behind all that wait.

        Where none has come since they began to wait, as long as they have waited: it is that at least. num_running: sequences
        that have their first token. They may have begun together, and will then end together, longer ago than the last
        seconds: the rate is at least theirs.
        """
        if not self.num_waiting:
            return 0.0
        recent = max(self._since, now - WINDOW_SECONDS)
        while len(self._firsts) > num_running and self._firsts[0] < recent:
            self._firsts.popleft()
        elapsed = now - min(recent, self._firsts[0]) if self._firsts else now - recent
        return self.num_waiting * elapsed / len(self._firsts) if self._firsts else elapsed
