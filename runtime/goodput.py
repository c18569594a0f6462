"""Which requests can not meet their objectives: refused at once, they cost nothing, and others are met."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from inferc.runtime.forecast import Forecast
from inferc.runtime.sequence import Sequence
from inferc.runtime.step_cost import StepWork


def may_refuse(seq: Sequence) -> bool:
    """Whether a waiting sequence asks for its first token by some time, and none of its request is out.

    The first of a request stands for all: it is let in before the others.
    """
    return seq.params.ttft_ms is not None and not seq.num_output and seq.index == 0


def never_met(seq: Sequence, num_found: int, forecast: Forecast) -> str | None:
    """Why an objective can not be met even by an idle engine, or None."""
    params = seq.params
    if params.ttft_ms is not None:
        seconds = forecast.prompt_seconds(seq.prompt_len, num_found)
        if seconds > params.ttft_ms / 1000:
            return (
                f"ttft_ms is {params.ttft_ms:g}, and {seq.prompt_len - num_found} tokens of the prompt that are not in"
                f" the cache take {1000 * seconds:.3g} ms on this machine when it is idle; allow more, or shorten it"
            )
    if params.tbt_ms is not None:
        seconds = forecast.decode_seconds(1, seq.prompt_len)
        if seconds > params.tbt_ms / 1000:
            return (
                f"tbt_ms is {params.tbt_ms:g}, and a step takes {1000 * seconds:.3g} ms on this machine when it is idle;"
                " allow more"
            )
    return None


def hopeless(
    waiting: Iterable[tuple[Sequence, int]],
    forecast: Forecast,
    now: float,
    beside: StepWork,
    ends: list[float],
    haste: float = 0.0,
) -> list[Sequence]:
    """Those of the waiting to leave out so that the fewest get their first token late.

    Prompts are computed one after the other, in order of their deadlines; where one would be late, the longest so far is
    left out (Moore 1968; optimal for one machine if all are there). What may not be refused stays, and takes its time.

    waiting: with how many of its tokens the cache has. beside: what is decoded in each step. ends: seconds from now at
    which a slot is expected to be free, for as many as there are, rising. haste: by this share of the time that a request gives for
    its first token it should have it earlier.
    """
    order = sorted(waiting, key=lambda pair: (pair[0].rank, pair[0].arrival))
    taken: list[tuple[float, int, Sequence]] = []  # may be left out; the longest first
    out: list[Sequence] = []
    busy = 0.0
    for place, (seq, num_found) in enumerate(order):
        seconds = forecast.prompt_seconds(len(seq.token_ids), num_found, beside)
        busy += seconds
        if may_refuse(seq):
            heapq.heappush(taken, (-seconds, place, seq))
        slot = place - len(out)
        begins = ends[slot] if slot < len(ends) else 0.0
        due = seq.rank - haste * (seq.rank - seq.arrived)
        if may_refuse(seq) and now + max(busy, begins + seconds) > due:
            longest, _, victim = heapq.heappop(taken)
            busy += longest
            out.append(victim)
    return out
