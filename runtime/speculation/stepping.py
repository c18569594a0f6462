"""The drafting by a runner of its own, which runs one step for each token of the longest draft.

Its K and V are in blocks with the numbers of the large model's: block b of a sequence is block b in both.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inferc.runtime.grammar.grammars import Grammars
from inferc.runtime.grammar.masks import Constraint
from inferc.runtime.kv_cache.manager import KVCacheManager
from inferc.runtime.scheduler.batch import Batch
from inferc.runtime.speculation.drafter import Drafter, Guesses
from inferc.runtime.step.plan import I32, I64, SampleRows, StepMasks, StepPlan, StepResult

EXPECTED = 0.6  # the share of drafted tokens that the large model is assumed to choose
LEARNING = 0.1  # the weight of the newest step in how long one takes


@dataclass(frozen=True)
class DraftSizes:
    """The sizes of what drafts and of its runner, in tokens, blocks and groups."""

    block_size: int
    max_model_len: int
    vocab_size: int
    num_groups: int
    max_num_batched_tokens: int
    num_others: int = 0  # tokens that are offered for each place beside the drafted one


class SteppingDrafter(Drafter):
    """A drafter that chooses one token of each sequence in a step of its own, and goes on with it in the next.

    A sequence that is held to a grammar is held to it here, too; of penalties nothing is known. most: the most tokens
    that are drafted at once.
    """

    def __init__(self, sizes: DraftSizes, most: int) -> None:
        self._sizes, self._most = sizes, most
        self._table: I32 | None = None
        self._grammars: Grammars | None = None
        self._depth_seconds = 0.0
        # For each row of the drafter's last step, the chosen token and the likeliest ones, with their probabilities.
        self._shown: list[list[tuple[int, float]]] = []

    @property
    def depth_seconds(self) -> float:
        """The time of a step of what drafts."""
        return self._depth_seconds

    def attach(self, cache: KVCacheManager) -> None:
        """Share the block table of the first KV group that keeps all of its blocks."""
        full = next(index for index, group in enumerate(cache.groups) if not group.spec.frees_blocks)
        self._table = cache.tables[full]

    def hold_to(self, grammars: Grammars, batch: Batch) -> None:
        """Hold drafts to the grammars of their sequences."""
        self._grammars = grammars

    @abstractmethod
    def _next(
        self,
        batch: Batch,
        slots: list[int],
        last: list[list[int]],
        depth: int,
        places: Sequence[Constraint | None],
    ) -> list[int]:
        """Return the token behind the one that was drafted last for each slot, or behind all that are known.

        depth: how many were drafted. places: in grammars.
        """

    def draft(self, batch: Batch, slots: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
        """Draft tokens, one step for each token of the longest draft."""
        return [each.token_ids for each in self.guess(batch, slots, counts)]

    def guess(self, batch: Batch, slots: Sequence[int], counts: Sequence[int]) -> list[Guesses]:
        """Draft tokens, and tell what else is likely at each place."""
        drafts: list[Guesses] = [Guesses([]) for _ in slots]
        places = [self._place(batch, slot) for slot in slots]
        try:
            self._go_on(batch, slots, counts, places, drafts)
        finally:  # a place in a grammar is where the sequence is, whatever happens
            for place, each in zip(places, drafts, strict=True):
                if place is not None and each.token_ids:
                    place.matcher.rollback(len(each.token_ids))
        return drafts

    def _go_on(
        self,
        batch: Batch,
        slots: Sequence[int],
        counts: Sequence[int],
        places: Sequence[Constraint | None],
        drafts: list[Guesses],
    ) -> None:
        """Append tokens to the drafts, one in each step, and go on with them in the grammars."""
        for depth in range(max(counts)):
            rows = [row for row, count in enumerate(counts) if count > depth == len(drafts[row].token_ids)]
            rows = [row for row in rows if (place := places[row]) is None or not place.matcher.is_ended]
            if not rows:
                break
            begun = time.perf_counter()
            held = [places[row] for row in rows]
            last = [drafts[row].token_ids[-1:] for row in rows]
            found = self._next(batch, [slots[row] for row in rows], last, depth, held)
            self._depth_seconds += LEARNING * (time.perf_counter() - begun - self._depth_seconds)
            for at, (place, row, token) in enumerate(zip(held, rows, found, strict=True)):
                if place is not None and not place.matcher.accept(token):
                    continue
                drafts[row].token_ids.append(token)
                if self._shown:
                    (_, probability), *likeliest = self._shown[at]
                    drafts[row].probabilities.append(probability)
                    others = [each for each in likeliest if each[0] != token]
                    drafts[row].others.append(others[: self._sizes.num_others])

    def _show(self, result: StepResult, token_ids: I32 | None = None) -> None:
        """Note what the rows of a step hold likely; token_ids: the large model's ids, unless they are the same."""
        rows = result.logprobs or ()
        assert all(row is not None for row in rows), "all of them or none are asked for it"
        self._shown = [
            [
                (token if token_ids is None else int(token_ids[token]), math.exp(value))
                for token, value in ((row.token_id, row.logprob), *row.top)
            ]
            for row in rows
            if row is not None
        ]

    def _asking(self, rows: SampleRows) -> SampleRows:
        """Ask for the tokens that a step's rows hold likely, if others than the chosen ones are offered."""
        if self._sizes.num_others:
            # One of them may be the chosen one.
            rows.num_logprobs = np.full(len(rows), self._sizes.num_others + 1, np.int32)
        return rows

    def _place(self, batch: Batch, slot: int) -> Constraint | None:
        """Return where a sequence is in its grammar, if it has one and both models have as many tokens."""
        if self._grammars is None or self._grammars.vocab_size != self._sizes.vocab_size:
            return None
        return self._grammars.place(batch, slot)

    def _plan(
        self,
        slots: Sequence[int],
        table: I32,
        starts: Sequence[int],
        texts: Sequence[I32],
        sample: SampleRows | None,
        masks: StepMasks | None = None,
    ) -> StepPlan:
        """Return the plan of a step over some tokens of each slot, from a position on.

        table: the block table of each slot, as long as its tokens need. sample: how one token is chosen behind those
        of each slot, or None for no token.
        """
        size, groups = self._sizes.block_size, self._sizes.num_groups
        lengths: I64 = np.array([len(ids) for ids in texts], np.int64)
        first: I64 = np.array(starts, np.int64)
        query_start_loc = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(lengths, out=query_start_loc[1:])
        ids = np.concatenate(texts).astype(np.int32)
        positions = np.arange(len(ids)) + np.repeat(first - query_start_loc[:-1], lengths)
        block = positions // size
        row = np.repeat(np.arange(len(slots)), lengths)
        slot_mapping = positions + (table[row, block].astype(np.int64) - block) * size
        none: I32 = np.zeros(0, np.int32)
        return StepPlan(
            token_ids=np.minimum(ids, self._sizes.vocab_size - 1),
            positions=positions,
            query_start_loc=query_start_loc,
            seq_lens=(first + lengths).astype(np.int32),
            seq_slots=np.array(slots, np.int32),
            logits_rows=none if sample is None else query_start_loc[1:] - 1,
            slot_mapping=(slot_mapping,) * groups,
            block_tables=(table,) * groups,
            sample=SampleRows.greedy(none) if sample is None else sample,
            masks=masks,
        )
