"""Which requests can not meet their objectives: refused at once, they cost nothing, and others are met.

What has begun is never ended: where its objectives are given up, it goes on behind all others.
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

NUM_LOOKED_AT = 64  # of those that wait, by a look
LOOK_SECONDS = 0.02  # between two looks for requests that can not be served in time
HASTE = 0.3  # share of the time to a token by which it should be there earlier, if others can give way; they lose theirs in it only
MARGIN = 0.08  # the same share, without which somebody is left out: who decodes beside a prompt becomes more until it is done


def may_refuse(seq: Sequence) -> bool:
    """Whether a waiting sequence asks for its first token by some time, and none of its request is out.

    The first of a request stands for all: it is let in before the others.
    """
    return seq.params.ttft_ms is not None and not seq.num_output and seq.index == 0


def is_first_late(seq: Sequence) -> bool:
    """Whether the first token has come later than the request asks for."""
    return seq.params.ttft_ms is not None and seq.first_at - seq.arrived > seq.params.ttft_ms / 1000


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


@dataclass
class Slot:
    """A place in the batch: in how many seconds it is free, and whose objective may be given up so that it is free at once."""

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
    """Who is to be left out so that the fewest get their next token late.

    Prompts are computed one after the other, in order of their deadlines, and each needs a slot; where one would be late, the
    longest prompt so far is left out, or if slots are short, who would keep one the longest (Moore 1968; optimal for one machine
    if all are there). What may not be refused stays, and takes its time. A slot serves one of those that wait: to count on it again
    after that one's answer met up to 12 points fewer of the objectives, simulated.

    beside: what is decoded in each step. slots: as many as there are. haste: by
    this share of the time that a request gives for its first token it should have it earlier. step_seconds: that a step may take.
    """
    found = Triage()
    slots = sorted(slots, key=lambda slot: slot.seconds)
    step = forecast.cost.seconds(beside)
    taken: list[tuple[Sequence, float]] = []  # may be left out, with what their prompts take
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
                    break  # somebody may be ahead, or done, by then
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
    """Says, a few times a second, who of the waiting is left out, and whether running ones have to give way to others."""

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
        """Who is to be left out, and whether anybody would be late if nobody gave way. now: on the scheduler's clock."""
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
            # Who has the first token and is ahead of its time, or asks for none, has a slot for them.
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
