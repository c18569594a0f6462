"""The admission policies, which decide whether a step has time for one more sequence, and for how many prompt tokens.

This is the interface; slo_admission.py admits by latency objectives.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from inferc.runtime.scheduler.batch import Batch
from inferc.runtime.scheduler.config import SchedulerConfig
from inferc.runtime.scheduler.waiting_queue import WaitingQueue
from inferc.runtime.step.forecast import LEAST_CHUNK, Forecast
from inferc.runtime.step.plan import I64
from inferc.runtime.step.sequence import Sequence


@dataclass
class Triage:
    """The waiting sequences to refuse, and the running ones whose objectives to give up, so that others meet theirs.

    refused: waiting sequences that are refused.
    lost: running sequences whose objectives are given up.
    any_late: whether some sequence would have been late.
    """

    refused: list[Sequence] = field(default_factory=list)
    lost: list[Sequence] = field(default_factory=list)
    any_late: bool = False


NEVER = 1 << 31  # tokens that no step has


class AdmissionPolicy:
    """The default admission policy, with which there is always time: blocks and the token budget alone decide."""

    looks = False
    """True if the policy looks for late sequences: running sequences give way to others only if it finds some."""

    def look(self, waiting: WaitingQueue, now: float) -> Triage:
        """Return which sequences to leave out, and whether any would be late if no sequence gave way.

        now: the time on the scheduler's clock.
        """
        return Triage()

    def objection(self, seq: Sequence, num_found: int) -> str | None:
        """Return why no schedule can meet a sequence's objectives, or None.

        num_found: the number of its tokens that are in the cache.
        """
        return None

    def has_time(self, seq: Sequence) -> bool:
        """Return whether steps with one more sequence are short enough for all sequences that decode."""
        return True

    def limit(self, budget: int, num_new: I64) -> int:
        """Return the token budget of a step beside its decodes.

        num_new: [num_slots] 1 for each slot that decodes, else 0.
        """
        return budget

    def most_drafted(self, num_new: I64) -> int:
        """Return how many drafted tokens a step may have; num_new as in `limit`."""
        return NEVER

    def is_lost(self, seq: Sequence) -> bool:
        """Return whether a sequence that has its first token has missed an objective for good."""
        return False


class TimedAdmission(AdmissionPolicy):
    """An admission policy that keeps steps with decodes within `tbt_ms`, as far as the forecast knows their cost."""

    def __init__(self, batch: Batch, forecast: Forecast, config: SchedulerConfig) -> None:
        self._batch, self._forecast, self._config = batch, forecast, config

    def step_seconds(self, slots: I64) -> float:
        """Return how long a step in which these slots decode may take, in seconds, or inf."""
        if not len(slots) or not self._forecast.cost.is_known:
            return np.inf
        return np.inf if self._config.tbt_ms is None else self._config.tbt_ms / 1000

    def has_time(self, seq: Sequence) -> bool:
        slots = self._batch.order
        if (seconds := self.step_seconds(slots)) == np.inf:
            return True
        return self._forecast.has_time(self._batch.decode_work(slots), len(seq.token_ids), seconds)

    def limit(self, budget: int, num_new: I64) -> int:
        """Limit the prompt tokens to those that the decoding sequences have time for."""
        slots = self._batch.order
        decodes = num_new[slots] > 0
        decoding = slots[decodes]
        if not self._config.chunked_prefill or (seconds := self.step_seconds(decoding)) == np.inf:
            return budget
        start = int(self._batch.num_computed[slots[~decodes]].max(initial=0))
        most = self._forecast.cost.most_tokens(self._batch.decode_work(decoding), seconds, start)
        return min(budget, max(LEAST_CHUNK, most))

    def most_drafted(self, num_new: I64) -> int:
        """Limit drafted tokens to those that the decoding sequences have time for."""
        slots = self._batch.order
        decoding = slots[num_new[slots] > 0]
        if (seconds := self.step_seconds(decoding)) == np.inf:
            return NEVER
        start = int(self._batch.num_computed[decoding].max(initial=0))
        return self._forecast.cost.most_tokens(self._batch.decode_work(decoding), seconds, start)
