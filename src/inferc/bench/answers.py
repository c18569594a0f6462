"""The outcome of one benchmark request, as its client saw it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

OK = "ok"
UNFINISHED = "unfinished"  # still in flight when the load was interrupted

# How the number of tokens in each chunk of an HTTP stream is known. "told": each chunk reports it. "shared": the stream
# reports only the total, which is divided evenly over its chunks. "chunks": nothing is reported, and each chunk counts
# as one token.
CountedBy = Literal["told", "shared", "chunks"]


@dataclass
class Answer:
    """The record of one request and of the answer that its client received.

    All times are in seconds: `planned` and `sent` count from the start of the load, the others from the moment the
    request was sent.

    messages: the arrival time and the number of tokens of each message that carries tokens. The bytes that one read of
    the connection returns are one message.
    status: "ok", "unfinished", or why the request failed: an HTTP status, a gRPC code, or a word.
    """

    number: int
    planned: float
    input_len: int
    output_len: int  # number of output tokens that the request asks for
    sent: float = math.nan
    messages: list[tuple[float, int]] = field(default_factory=list)
    whole: float = math.nan
    status: str = UNFINISHED
    detail: str = ""
    counted_by: CountedBy = "told"
    prompt_tokens: int | None = None  # number of prompt tokens that the server reports
    cached_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.messages)

    @property
    def is_ok(self) -> bool:
        return self.status == OK

    @property
    def ttft(self) -> float:
        return self.messages[0][0]

    @property
    def tpot(self) -> float | None:
        """The mean time between two tokens of the answer; None if it has fewer than two tokens."""
        count = self.num_tokens
        return (self.messages[-1][0] - self.messages[0][0]) / (count - 1) if count > 1 else None

    @property
    def gaps(self) -> list[float]:
        """The time between a token and the one before it, for every token of the messages after the first.

        A message may carry several tokens; each of them then counts as an equal share of the gap before the message.
        The tokens of the first message have no gap before them and are not counted.
        """
        return [(now - before) / count for (before, _), (now, count) in pairwise(self.messages) for _ in range(count)]

    def is_good(self, ttft_ms: float | None, tbt_ms: float | None) -> bool:
        """Return whether the request counts towards goodput, by the same rule as the server's own count.

        The request must have succeeded, its first token must have come within `ttft_ms`, and the mean time between its
        tokens must be at most `tbt_ms`. None means that any time is good enough.
        """
        if not self.is_ok:
            return False
        mean = self.tpot
        return (ttft_ms is None or self.ttft <= ttft_ms / 1e3) and (
            tbt_ms is None or mean is None or mean <= tbt_ms / 1e3
        )

    def end(self, whole: float) -> None:
        """Record that the answer ended by itself, `whole` seconds after the request was sent."""
        self.whole = whole
        if self.messages:
            self.status = OK
        else:
            self.fail("empty", "the stream ended without a token")

    def fail(self, status: str, detail: str) -> None:
        self.status, self.detail = status, detail

    def row(self) -> dict[str, Any]:
        """Return the record as a JSON object for the result file; unknown values are None."""
        return {
            "number": self.number,
            "planned_s": self.planned,
            "sent_s": None if math.isnan(self.sent) else self.sent,
            "status": self.status,
            "detail": self.detail,
            "input_len": self.input_len,
            "output_len": self.output_len,
            "output_tokens": self.num_tokens,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "counted_by": self.counted_by,
            "e2e_s": None if math.isnan(self.whole) else self.whole,
            "messages": [[round(when, 6), count] for when, count in self.messages],
        }


def shared_out(total: int, parts: int) -> list[int]:
    """Divide `total` tokens over `parts` chunks as evenly as whole numbers allow; the first chunk has the most."""
    ends = [-(-index * total // parts) for index in range(parts + 1)]
    return [after - before for before, after in pairwise(ends)]


def num_under_way(answers: Sequence[Answer], when: float) -> int:
    """Return the number of requests that had been sent and had not ended, `when` seconds after the load began."""
    return sum(each.sent <= when and not each.sent + each.whole <= when for each in answers)
