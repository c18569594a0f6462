"""The contract of what drafts tokens of running sequences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from inferc.runtime.grammar.grammars import Grammars
from inferc.runtime.kv_cache.manager import KVCacheManager
from inferc.runtime.scheduler.batch import Batch
from inferc.runtime.step.plan import StepPlan, StepResult
from inferc.runtime.step.sequence import Sequence as Seq


@dataclass(frozen=True)
class Offer:
    """An offer of a drafter for a sequence, before it drafts.

    most: how many tokens at most.
    kind: a small number under which it is remembered how often the model chose such tokens.
    expected: the share of them that is assumed before that is known.
    num_others: how many other tokens at most it can tell for each place.
    """

    most: int
    kind: int = 0
    expected: float = 0.5
    num_others: int = 0


@dataclass(frozen=True)
class Guesses:
    """The tokens that a drafter goes on with, and what else it holds possible at their places.

    probabilities: of each token, and others: at each place the likeliest other tokens with their probabilities, in
    descending order; both are empty for a drafter that only knows the tokens.
    """

    token_ids: list[int]
    probabilities: list[float] = field(default_factory=list)
    others: list[list[tuple[int, float]]] = field(default_factory=list)


NOTHING = Offer(0)


class Drafter(ABC):
    """A drafter for the sequences of one engine, on the engine's thread.

    Every token of a sequence is known when it is asked. A wrong draft costs time, and never changes an answer.
    """

    reads_steps = False
    """True if `submitted`, `landed` and `updated` are to be called with every step of the large model."""

    @property
    def depth_seconds(self) -> float:
        """The time of drafting one token more for the sequences of a step."""
        return 0.0

    def attach(self, cache: KVCacheManager) -> None:
        """Use the KV cache of the engine, whose block tables tell where a sequence's tokens are."""

    def hold_to(self, grammars: Grammars, batch: Batch) -> None:
        """Use the grammars that the engine's sequences are held to."""

    def watch(self, batch: Batch) -> None:
        """Look at the running sequences, before each step."""

    def may_draft(self, batch: Batch) -> bool:
        """Return whether anything can be drafted for any of the running sequences."""
        return True

    @abstractmethod
    def offers(self, batch: Batch, slots: Sequence[int]) -> list[Offer]:
        """Return what could be drafted for each of some running sequences."""

    @abstractmethod
    def draft(self, batch: Batch, slots: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
        """Draft up to that many tokens for each of some of the sequences that `offers` was asked for."""

    def guess(self, batch: Batch, slots: Sequence[int], counts: Sequence[int]) -> list[Guesses]:
        """Draft like `draft`, and tell what else is possible at each place, as far as was offered."""
        return [Guesses(ids) for ids in self.draft(batch, slots, counts)]

    def is_promising(self, batch: Batch, slots: Sequence[int]) -> bool:
        """Return whether it is worth to wait for the last tokens, after offers of late have led to nothing."""
        return False

    def submitted(self, plan: StepPlan, seqs: Sequence[Seq | None]) -> None:
        """Mark in a step what is wanted of it, before the runner gets it. seqs: by slot."""

    def landed(self, plan: StepPlan, result: StepResult) -> None:
        """Take the result of a step."""

    def updated(self) -> None:
        """Go on with the step that landed last, now that its sequences have their tokens."""

    def close(self) -> None:
        """Release what the drafter holds."""
