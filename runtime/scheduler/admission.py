"""Admission: whether a step has time for one more sequence, and for how much of prompts. This is the seam; who admits by
objectives is in slo_admission.py.
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
    """Who is left out so that others are in time.

    refused: of the waiting; lost: of the running, their objectives are given up; any_late: somebody would have been late.
    """

    refused: list[Sequence] = field(default_factory=list)
    lost: list[Sequence] = field(default_factory=list)
    any_late: bool = False


class AdmissionPolicy:
    """Everybody has time: the scheduler admits by blocks and the token budget alone."""

    looks = False
    """Whether it looks for who would be late: running sequences give way to others only if it finds somebody."""

    def look(self, waiting: WaitingQueue, now: float) -> Triage:
        """Who is to be left out, and whether anybody would be late if nobody gave way. now: on the scheduler's clock."""
        return Triage()

    def objection(self, seq: Sequence, num_found: int) -> str | None:
        """Why a sequence's objectives can not be met by any schedule, or None. num_found: tokens that the cache has of it."""
        return None

    def has_time(self, seq: Sequence) -> bool:
        """Whether steps with one more sequence are short enough for all that decode."""
        return True

    def limit(self, budget: int, decoding: I64, begun: I64) -> int:
        """The token budget of a step beside what these slots decode. begun: slots of which a part of the prompt is computed."""
        return budget

    def is_lost(self, seq: Sequence) -> bool:
        """Whether an objective of a sequence, whose first token has come, is missed for good."""
        return False


class TimedAdmission(AdmissionPolicy):
    """Steps in which somebody decodes take no longer than `tbt_ms`, as far as the forecast knows what they cost."""

    def __init__(self, batch: Batch, forecast: Forecast, config: SchedulerConfig) -> None:
        self._batch, self._forecast, self._config = batch, forecast, config

    def step_seconds(self, slots: I64) -> float:
        """How long a step in which these decode may take, or inf."""
        if not len(slots) or not self._forecast.cost.is_known:
            return np.inf
        return np.inf if self._config.tbt_ms is None else self._config.tbt_ms / 1000

    def has_time(self, seq: Sequence) -> bool:
        slots = self._batch.order
        if (seconds := self.step_seconds(slots)) == np.inf:
            return True
        return self._forecast.has_time(self._batch.decode_work(slots), len(seq.token_ids), seconds)

    def limit(self, budget: int, decoding: I64, begun: I64) -> int:
        """No more of prompts than those who decode have time for."""
        if not self._config.chunked_prefill or (seconds := self.step_seconds(decoding)) == np.inf:
            return budget
        start = int(self._batch.num_computed[begun].max(initial=0))
        most = self._forecast.cost.most_tokens(self._batch.decode_work(decoding), seconds, start)
        return min(budget, max(LEAST_CHUNK, most))
