"""What came of one request, as its client saw it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

OK = "ok"
UNFINISHED = "unfinished"  # still under way when the load was interrupted

# How the tokens of an HTTP stream's chunks are known: each chunk tells; the stream tells how many there were in all, which are
# shared out over its chunks; or nobody tells, and a chunk counts as one token.
CountedBy = Literal["told", "shared", "chunks"]


@dataclass
class Answer:
    """Of one request. Seconds: `planned` and `sent` since the load began, the rest since it was sent.

    messages: when each came that has tokens, and how many it has. What is read from a connection at once is one message.
    status: "ok", "unfinished", or why it failed: an HTTP status, a gRPC code, or a word.
    """

    number: int
    planned: float
    input_len: int
    output_len: int  # that was asked for
    sent: float = math.nan
    messages: list[tuple[float, int]] = field(default_factory=list)
    whole: float = math.nan
    status: str = UNFINISHED
    detail: str = ""
    counted_by: CountedBy = "told"
    prompt_tokens: int | None = None  # as the server counted them
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
        """The mean time between its tokens; None of a single token."""
        count = self.num_tokens
        return (self.messages[-1][0] - self.messages[0][0]) / (count - 1) if count > 1 else None

    @property
    def gaps(self) -> list[float]:
        """The time between a token and the one before it, for every token of the messages after the first.

        A message may carry several tokens, and then each of them counts as its share of the gap before the message. Those that
        come in the first message have no gap before them, so none of theirs is counted.
        """
        return [(now - before) / count for (before, _), (now, count) in pairwise(self.messages) for _ in range(count)]

    def is_good(self, ttft_ms: float | None, tbt_ms: float | None) -> bool:
        """As the server counts goodput: it ended well, its first token came within `ttft_ms`, and the others within `tbt_ms`
        of one another on average. None: any time is good."""
        if not self.is_ok:
            return False
        mean = self.tpot
        return (ttft_ms is None or self.ttft <= ttft_ms / 1e3) and (
            tbt_ms is None or mean is None or mean <= tbt_ms / 1e3
        )

    def end(self, whole: float) -> None:
        """It ended by itself, after so many seconds."""
        self.whole = whole
        if self.messages:
            self.status = OK
        else:
            self.fail("empty", "the stream ended without a token")

    def fail(self, status: str, detail: str) -> None:
        self.status, self.detail = status, detail

    def row(self) -> dict[str, Any]:
        """For the file of a run; what is not known is None."""
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
    """`total` tokens over so many chunks, as evenly as whole numbers can be; the first has the most."""
    ends = [-(-index * total // parts) for index in range(parts + 1)]
    return [after - before for before, after in pairwise(ends)]


def num_under_way(answers: Sequence[Answer], when: float) -> int:
    """Requests that had been sent and not ended, so many seconds after the load began."""
    return sum(each.sent <= when and not each.sent + each.whole <= when for each in answers)
