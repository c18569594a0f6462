"""A forecast of a request's time to first token, from how fast other requests got theirs.

A request that would wait longer than it may is refused at once.
"""

from __future__ import annotations

from collections import deque
from contextvars import ContextVar

WINDOW_SECONDS = 10.0
MOST_FIRSTS = 4096  # first tokens whose times are remembered
# Seconds that the present call has left, if its client set a deadline.
WITHIN: ContextVar[float | None] = ContextVar("WITHIN", default=None)


# When the present call came to the server, on the monotonic clock.
ARRIVED_AT: ContextVar[float | None] = ContextVar("ARRIVED_AT", default=None)


class QueueForecast:
    """A count of the sequences that wait for a first token, and of how fast first tokens come; times in seconds."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self._since = 0.0  # start of the present period in which some sequence waits
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
        """Take sequences that ended before their first token off the number of those that wait."""
        self.num_waiting -= count

    def seconds(self, now: float, num_running: int = 0) -> float:
        """Return how long a sequence that came now would wait for its first token, behind all that wait already.

        The rate is that of the last WINDOW_SECONDS. If no first token has come since the sequences began to wait, the
        forecast is how long they have waited, which is a lower bound.
        num_running: sequences that have their first token. They may have started together longer ago than the window,
        and will then end together; so the window reaches back to the last num_running first tokens.
        """
        if not self.num_waiting:
            return 0.0
        recent = max(self._since, now - WINDOW_SECONDS)
        while len(self._firsts) > num_running and self._firsts[0] < recent:
            self._firsts.popleft()
        elapsed = now - min(recent, self._firsts[0]) if self._firsts else now - recent
        return self.num_waiting * elapsed / len(self._firsts) if self._firsts else elapsed
