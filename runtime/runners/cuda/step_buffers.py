"""The host memory of a step in flight on a GPU, and the reading of the results that the device wrote there."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import c_void_p
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferc.runtime.runners.cuda.capacity import Capacity
from inferc.runtime.step.limits import MAX_TOP_LOGPROBS
from inferc.runtime.step.plan import I32, HiddenRows, Logprobs, StepResult


@dataclass
class StepBuffers:
    """The host memory of one step in flight, and how to read its results."""

    inputs: NDArray[np.uint8]
    outputs: NDArray[np.uint8]
    event: c_void_p
    views: dict[Capacity, dict[str, NDArray[Any]]] = field(default_factory=dict)
    lists: NDArray[np.uint8] | None = None  # the step's bias, banned and allowed ids
    masks: NDArray[np.uint32] | None = None  # the step's masks [masks, words]
    slots: I32 = field(default_factory=lambda: np.zeros(0, np.int32))  # of its logits rows
    num_rows: int = 0
    has_drafts: bool = False  # tokens of the step were drafted, so that not every row may count
    num_logprobs: list[int] | None = None
    wants_logprobs: bool = False
    places: Mapping[str, int] = field(default_factory=dict)
    kept: HiddenRows | None = None  # the rows that the step keeps for a head
    error: str | None = None

    def result(self) -> StepResult:
        """Return the result that the device wrote for the step."""
        if not self.num_rows:
            return StepResult(np.zeros(0, np.int32), kept=self.kept)
        ids = self._read("token_ids", np.int32).copy()
        failed = ids < 0
        logprobs: list[Logprobs | None] | None = None
        if self.num_logprobs is not None:
            own, ranks = self._read("logprobs", np.float32).tolist(), self._read("ranks", np.int32).tolist()
            top_ids = self._read("top_ids", np.int32, MAX_TOP_LOGPROBS).reshape(self.num_rows, -1)
            top = self._read("top_logprobs", np.float32, MAX_TOP_LOGPROBS).reshape(self.num_rows, -1)
            logprobs = []
            for row, count in enumerate(self.num_logprobs):
                pairs = zip(top_ids[row, :count].tolist(), top[row, :count].tolist(), strict=True)
                found = Logprobs(int(ids[row]), own[row], ranks[row], tuple(pairs))
                logprobs.append(found if count and not failed[row] else None)
        ids[failed] = 0
        chosen = self._read("logprobs", np.float32).copy() if self.wants_logprobs else None
        return StepResult(ids, logprobs, failed if failed.any() else None, chosen_logprobs=chosen, kept=self.kept)

    @property
    def token_ids(self) -> I32:
        """The ids that the step sampled, once it is done; -1 for a row that failed."""
        return self._read("token_ids", np.int32)

    def _read(self, name: str, dtype: type[np.generic], width: int = 1) -> NDArray[Any]:
        start = self.places[name]
        return self.outputs[start : start + 4 * self.num_rows * width].view(dtype)
