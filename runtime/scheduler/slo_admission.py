"""Admission by latency objectives: requests that cannot meet theirs are refused at once, so that others meet theirs.

A sequence that has begun is never ended: if its objectives are given up, it goes on behind all others.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from inferc.runtime.scheduler.admission import TimedAdmission, Triage
from inferc.runtime.scheduler.batch import Batch
from inferc.runtime.scheduler.config import SchedulerConfig
from inferc.runtime.scheduler.policies import TURN_TOKENS, is_due
from inferc.runtime.scheduler.waiting_queue import WaitingQueue
from inferc.runtime.step.cost import StepWork
from inferc.runtime.step.forecast import Forecast
from inferc.runtime.step.plan import I64
from inferc.runtime.step.sequence import Sequence

NUM_LOOKED_AT = 64  # waiting sequences that one look considers
LOOK_SECONDS = 0.02  # the time between two looks for requests that cannot be served in time
# The margin before a first token's deadline, as a share of the time to it, within which running sequences may give way
# for it. Their own objectives are given up only once the token is expected within this margin.
HASTE = 0.3
# The margin before a first token's deadline within which a request is refused. It allows for the sequences
# that begin to decode, and so make steps longer, while a prompt is computed.
MARGIN = 0.08


def may_refuse(seq: Sequence) -> bool:
    """Return whether a waiting sequence has a deadline for its first token and its request has no token yet.

    The first sequence of a request stands for all, because it is admitted before the others.
    """
    return seq.params.ttft_ms is not None and not seq.num_output and seq.index == 0


def is_first_late(seq: Sequence) -> bool:
    """Return whether the first token came later than the request asks for."""
    return seq.params.ttft_ms is not None and seq.first_at - seq.arrived > seq.params.ttft_ms / 1000


def never_met(seq: Sequence, num_found: int, forecast: Forecast) -> str | None:
    """Return why even an idle engine cannot meet an objective, or None."""
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
                f"tbt_ms is {params.tbt_ms:g}, and a step takes {1000 * seconds:.3g} ms on this machine"
                " when it is idle; allow more"
            )
    return None


@dataclass
class Slot:
    """A place in the batch: in how many seconds it is free, and whose objective may be given up for it.

    Without the objective of `seq` the place is free at once.
    """

    seconds: float = 0.0
    seq: Sequence | None = None


def triage(
    waiting: Iterable[Sequence],
    forecast: Forecast,
    now: float,
    beside: StepWork,
    slots: Iterable[Slot],
    haste: float = 0.0,
    step_seconds: float = math.inf,
) -> Triage:
    """Decide which sequences to leave out so that the fewest get their next token late.

    Prompts are computed one after the other, in order of their deadlines, and each needs a slot. If one would be late,
    the longest prompt so far is left out, or, if slots are short, the sequence that would keep one the longest (Moore
    1968; optimal for one machine if all requests are there). A sequence that may not be refused stays, and takes its
    time. A slot serves one of the waiting sequences: in simulation, counting on the slot again after that one's answer
    met up to 12 percentage points fewer of the objectives.

    beside: the decodes of each step.
    slots: all slots of the batch.
    haste: the share of the time to its first token by which a request should have it earlier.
    step_seconds: the most that a step may take.
    """
    found = Triage()
    slots = sorted(slots, key=lambda slot: slot.seconds)
    step = forecast.cost.seconds(beside)
    taken: list[tuple[Sequence, float]] = []  # sequences that may be left out, with the seconds of their prompts
    busy, place = 0.0, 0

    def seconds_in_slot(seq: Sequence) -> float:
        return step * max(0, seq.predicted - len(seq.token_ids))

    def is_late(due: float, seconds: float) -> bool:
        begins = slots[place].seconds if place < len(slots) else 0.0
        return now + max(busy, begins + seconds) > due

    for seq in heapq.nsmallest(NUM_LOOKED_AT, waiting, key=lambda seq: (seq.rank, seq.arrival)):
        seconds = forecast.prompt_seconds(len(seq.token_ids), seq.num_found, beside, step_seconds)
        busy += seconds
        if may_refuse(seq):
            taken.append((seq, seconds))
        due = seq.rank if seq.num_output else seq.rank - haste * (seq.rank - seq.arrived)
        while (may_refuse(seq) or seq.num_output) and is_due(seq) and is_late(due, seconds):
            found.any_late = True
            are_slots_short = now + busy <= due
            victim = max(taken, key=lambda pair: seconds_in_slot(pair[0]) if are_slots_short else pair[1], default=None)
            last = max((slot for slot in slots[place:] if slot.seq), key=lambda slot: slot.seconds, default=None)
            if are_slots_short and last and (victim is None or last.seconds > seconds_in_slot(victim[0])):
                assert last.seq is not None
                if now + seconds < due - HASTE * (due - seq.arrived):
                    break  # some sequence may be ahead of its time, or done, by then
                found.lost.append(last.seq)
                last.seconds, last.seq = 0.0, None
                slots.sort(key=lambda slot: slot.seconds)
                continue
            if victim is not None:
                taken.remove(victim)
                found.refused.append(victim[0])
                busy -= victim[1]
                place -= 1
            break
        place += 1
    return found


class SloAdmission(TimedAdmission):
    """An admission policy that decides, a few times per second, which requests to refuse and which give way."""

    looks = True

    def __init__(self, batch: Batch, forecast: Forecast, config: SchedulerConfig) -> None:
        super().__init__(batch, forecast, config)
        self._next_look = 0.0

    def objection(self, seq: Sequence, num_found: int) -> str | None:
        return never_met(seq, num_found, self._forecast) if self._forecast.cost.is_known else None

    def step_seconds(self, slots: I64) -> float:
        seconds = super().step_seconds(slots)
        if not len(slots) or not self._forecast.cost.is_known:
            return seconds
        return min(seconds, float(self._batch.tbt[slots].min()))

    def is_lost(self, seq: Sequence) -> bool:
        return is_first_late(seq)

    def look(self, waiting: WaitingQueue, now: float) -> Triage:
        """Return which sequences to leave out, and whether any would be late if no sequence gave way.

        now: the time on the scheduler's clock.
        """
        forecast, batch = self._forecast, self._batch
        if now < self._next_look or not forecast.cost.is_known:
            return Triage()
        self._next_look = now + LOOK_SECONDS
        first = waiting.front(NUM_LOOKED_AT)
        step_seconds = self.step_seconds(batch.decoding())
        slots = batch.order
        work = batch.decode_work(batch.decoding())
        left = np.maximum(batch.predicted[slots] - batch.num_tokens[slots], 0) * forecast.cost.seconds(work)
        free = [0.0] * len(batch.free_slots)
        busy = [Slot(seconds) for seconds in (*free, *left.tolist())]
        found = triage(first, forecast, now, work, busy, HASTE, step_seconds)
        if found.any_late:
            # A sequence that has its first token, and is ahead of its time or has no `tbt_ms`, can give its slot to
            # them.
            has_begun = batch.num_known[slots] > batch.prompt_len[slots]
            due, tbt = batch.due(slots) - now, batch.tbt[slots]
            is_ahead = has_begun & (due > TURN_TOKENS * np.where(np.isinf(tbt), 0.0, tbt))
            rows = zip(slots.tolist(), left.tolist(), has_begun.tolist(), is_ahead.tolist(), strict=True)
            busy = [Slot(seconds) for seconds in free]
            for slot, seconds, begun, ahead in rows:
                busy.append(Slot() if ahead else Slot(seconds, batch.seqs[slot] if begun else None))
            found = triage(first, forecast, now, work, busy, MARGIN, step_seconds)
            found.any_late = True
        return found
