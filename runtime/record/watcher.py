"""The seam through which an engine tells of its requests and steps, to what records them or keeps their values."""

from __future__ import annotations

from collections.abc import Sequence

from inferc.runtime.step.plan import StepPlan, StepResult
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.step.sequence import Sequence as Seq
from inferc.runtime.step.sequence import StepOutputs


class Watcher:
    """A watcher of an engine's requests and steps, on the engine's thread; this one does nothing."""

    def check(self, prompt_len: int, max_total: int, params: SamplingParams) -> None:
        """Raise RequestError for a request of at most `max_total` tokens that cannot be watched."""

    def begin(self, name: str, seed: int, seqs: Sequence[Seq]) -> None:
        """Note that a request begins with these sequences. name: the caller's own name for it."""

    def submitted(self, plan: StepPlan, seqs: Sequence[Seq | None]) -> None:
        """Look at a step, and mark in it what is wanted of it, before the runner gets it. seqs: by slot."""

    def landed(self, plan: StepPlan, result: StepResult) -> None:
        """Take the result of a step, before it is known which sequences end with it."""

    def updated(self, outputs: StepOutputs) -> None:
        """Note the outputs of a step."""

    def end(self, seq: Seq, reason: str) -> None:
        """Note that a sequence has ended, with all its tokens in its own lists."""

    def close(self) -> None:
        """Write what has ended; nothing more comes."""
