"""The drafter of what a grammar leaves no choice about: names of properties, brackets, the frame of a call.

The grammar fixes the text, not the tokens: `"name": ` can be spelled in several ways, between which the model chooses.
So the likeliest spelling is drafted, and the model's choice is kept, as with any draft. Source of the idea: "jump
forward decoding" (Zheng et al. 2024, SGLang, arXiv:2312.07104, section 4), which changes the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inferc.runtime.grammar.grammars import Grammars
from inferc.runtime.kv_cache.manager import KVCacheManager
from inferc.runtime.scheduler.batch import Batch
from inferc.runtime.speculation.drafter import NOTHING, Drafter, Guesses, Offer
from inferc.runtime.step.plan import StepPlan, StepResult
from inferc.runtime.step.sequence import Sequence as Seq

KIND = 8
EXPECTED = 0.9  # the share of these tokens that the model is assumed to choose

Forced = Callable[[int], list[int]]
"""A function that returns the tokens that a slot's grammar leaves no choice about; none for a free sequence."""


class ForcedDrafter(Drafter):
    """The drafter of forced tokens, and of what another drafter offers where there are none.

    most: the most tokens that are drafted at once. other: None drafts nothing else.
    """

    def __init__(self, most: int, other: Drafter | None = None) -> None:
        self.forced: Forced = lambda slot: []
        self.is_any_held: Callable[[], bool] = lambda: False
        self._most, self._other = most, other
        self.reads_steps = other is not None and other.reads_steps
        self._found: dict[int, list[int]] = {}  # by slot, what is forced

    @property
    def depth_seconds(self) -> float:
        """The time of drafting one token more."""
        return 0.0 if self._other is None else self._other.depth_seconds

    def attach(self, cache: KVCacheManager) -> None:
        """Hand the cache to the other drafter."""
        if self._other is not None:
            self._other.attach(cache)

    def hold_to(self, grammars: Grammars, batch: Batch) -> None:
        """Draft what these grammars force."""
        self.forced = lambda slot: grammars.forced(batch, slot, self._most)
        self.is_any_held = lambda: grammars.is_any_held
        if self._other is not None:
            self._other.hold_to(grammars, batch)

    def watch(self, batch: Batch) -> None:
        """Let the other drafter look at the running sequences."""
        if self._other is not None:
            self._other.watch(batch)

    def may_draft(self, batch: Batch) -> bool:
        """Return whether any sequence is held to a grammar, or the other drafter may draft."""
        return self.is_any_held() or (self._other is not None and self._other.may_draft(batch))

    def offers(self, batch: Batch, slots: Sequence[int]) -> list[Offer]:
        """Return the forced tokens of each sequence, or the other drafter's offer."""
        self._found = {slot: ids for slot in slots if (ids := self.forced(slot)[: self._most])}
        left = [slot for slot in slots if slot not in self._found]
        others = dict(zip(left, self._other.offers(batch, left), strict=True)) if self._other is not None else {}
        return [
            Offer(len(self._found[slot]), KIND, EXPECTED) if slot in self._found else others.get(slot, NOTHING)
            for slot in slots
        ]

    def draft(self, batch: Batch, slots: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
        """Draft what was offered."""
        return [each.token_ids for each in self.guess(batch, slots, counts)]

    def guess(self, batch: Batch, slots: Sequence[int], counts: Sequence[int]) -> list[Guesses]:
        """Draft what was offered; what else is possible at a place, the other drafter knows."""
        found = [Guesses(self._found.get(slot, [])[:count]) for slot, count in zip(slots, counts, strict=True)]
        left = [at for at, slot in enumerate(slots) if slot not in self._found]
        if left and self._other is not None:
            guesses = self._other.guess(batch, [slots[at] for at in left], [counts[at] for at in left])
            for at, each in zip(left, guesses, strict=True):
                found[at] = each
        return found

    def is_promising(self, batch: Batch, slots: Sequence[int]) -> bool:
        """Return whether the other drafter's drafts are worth waiting for."""
        return self._other is not None and self._other.is_promising(batch, slots)

    def submitted(self, plan: StepPlan, seqs: Sequence[Seq | None]) -> None:
        """Show the other drafter a step."""
        if self._other is not None:
            self._other.submitted(plan, seqs)

    def landed(self, plan: StepPlan, result: StepResult) -> None:
        """Show the other drafter the result of a step."""
        if self._other is not None:
            self._other.landed(plan, result)

    def updated(self) -> None:
        """Let the other drafter go on with the landed step."""
        if self._other is not None:
            self._other.updated()

    def close(self) -> None:
        """Close the other drafter."""
        if self._other is not None:
            self._other.close()
