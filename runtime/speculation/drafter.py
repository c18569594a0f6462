"""The contract of what drafts tokens of running sequences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from inferc.runtime.grammar.grammars import Grammars
from inferc.runtime.kv_cache.manager import KVCacheManager
from inferc.runtime.scheduler.batch import Batch


@dataclass(frozen=True)
class Offer:
    """An offer of a drafter for a sequence, before it drafts.

    most: how many tokens at most.
    kind: a small number under which it is remembered how often the model chose such tokens.
    expected: the share of them that is assumed before that is known.
    """

    most: int
    kind: int = 0
    expected: float = 0.5


NOTHING = Offer(0)


class Drafter(ABC):
    """A drafter for the sequences of one engine, on the engine's thread.

    Every token of a sequence is known when it is asked. A wrong draft costs time, and never changes an answer.
    """

    @property
    def depth_seconds(self) -> float:
        """The time of drafting one token more for the sequences of a step."""
        return 0.0

    def attach(self, cache: KVCacheManager) -> None:
        """Use the KV cache of the engine, whose block tables tell where a sequence's tokens are."""

    def hold_to(self, grammars: Grammars, batch: Batch) -> None:
        """Use the grammars that the engine's sequences are held to."""

    def may_draft(self, batch: Batch) -> bool:
        """Return whether anything can be drafted for any of the running sequences."""
        return True

    @abstractmethod
    def offers(self, batch: Batch, slots: Sequence[int]) -> list[Offer]:
        """Return what could be drafted for each of some running sequences."""

    @abstractmethod
    def draft(self, batch: Batch, slots: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
        """Draft up to that many tokens for each of some of the sequences that `offers` was asked for."""

    def is_promising(self, batch: Batch, slots: Sequence[int]) -> bool:
        """Return whether it is worth to wait for the last tokens, after offers of late have led to nothing."""
        return False

    def close(self) -> None:
        """Release what the drafter holds."""
