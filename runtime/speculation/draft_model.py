"""The drafter that is a model: a smaller one of the same vocabulary guesses the next tokens, one step after the other.

It keeps K and V of its own, in blocks with the numbers of the large model's: block b of a sequence is block b in both.
So what the prefix cache finds for the one is found for the other, if the draft model computed it. What it computed that
was not chosen is written over. Source: Leviathan et al. 2023, arXiv:2211.17192.

It draws with the temperature, the seed and the random numbers of the large model. Where both models think alike they
then choose alike, also in sampling. A sequence that is held to a grammar is held to it here, too; of penalties the
draft model knows nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inferc.errors import InfercError
from inferc.runtime.grammar.grammars import Grammars
from inferc.runtime.grammar.masks import Constraint, FixedMasks
from inferc.runtime.kv_cache.manager import KVCacheManager
from inferc.runtime.runners.api import Runner
from inferc.runtime.scheduler.batch import Batch
from inferc.runtime.speculation.drafter import NOTHING, Drafter, Offer
from inferc.runtime.step.plan import I32, I64, SampleRows, StepPlan
from inferc.runtime.step.sequence import Sequence as Seq

KIND = 9
EXPECTED = 0.6  # the share of drafted tokens that the large model is assumed to choose
LEARNING = 0.1  # the weight of the newest step in how long one takes


@dataclass(frozen=True)
class DraftSizes:
    """The sizes of a draft model and of its runner, in tokens, blocks and groups."""

    block_size: int
    max_model_len: int
    vocab_size: int
    num_groups: int
    max_num_batched_tokens: int


@dataclass
class _Slot:
    """A sequence's place in the draft model.

    num_preemptions: how often the sequence had been preempted when it came.
    num_computed: the first tokens whose K and V are there. num_named: its first blocks whose content is noted.
    drafted: what was drafted behind `num_known` tokens.
    """

    seq: Seq | None = None
    num_preemptions: int = 0
    num_computed: int = 0
    num_named: int = 0
    num_known: int = 0
    drafted: tuple[int, ...] = ()


class ModelDrafter(Drafter):
    """The drafter of a smaller model, whose runner has as many blocks as the large model's full KV group.

    most: the most tokens that are drafted at once.
    """

    def __init__(self, runner: Runner, sizes: DraftSizes, num_slots: int, most: int) -> None:
        self._runner, self._sizes, self._most = runner, sizes, most
        self._slots = [_Slot() for _ in range(num_slots)]
        self._content: dict[int, bytes] = {}  # by block, the hash of the tokens whose K and V it has
        self._table: I32 | None = None
        self._grammars: Grammars | None = None
        self._depth_seconds = 0.0

    @property
    def depth_seconds(self) -> float:
        """The time of a step of the draft model."""
        return self._depth_seconds

    def attach(self, cache: KVCacheManager) -> None:
        """Share the block table of the first KV group that keeps all of its blocks."""
        full = next(index for index, group in enumerate(cache.groups) if not group.spec.frees_blocks)
        self._table = cache.tables[full]

    def hold_to(self, grammars: Grammars, batch: Batch) -> None:
        """Hold drafts to the grammars of their sequences."""
        self._grammars = grammars

    def offers(self, batch: Batch, slots: Sequence[int]) -> list[Offer]:
        """Return what can be drafted for sequences whose tokens the draft model has computed.

        For the others it computes as many as a step takes.
        """
        offers, left = [], self._sizes.max_num_batched_tokens
        behind: list[tuple[int, int]] = []
        for slot in slots:
            state = self._settle(batch, slot)
            known = int(batch.num_known[slot])
            room = min(self._sizes.max_model_len, len(batch.tokens[slot])) - known
            missing = known - state.num_computed
            if room <= 0 or missing > self._per_sequence(len(slots)):
                offers.append(NOTHING)
                count = min(missing - 1, left) if room > 0 else 0
                if count > 0:
                    behind.append((slot, count))
                    left -= count
            else:
                offers.append(Offer(min(self._most, room), KIND, EXPECTED))
        if behind:
            self._compute(batch, behind)
        return offers

    def _per_sequence(self, num_seqs: int) -> int:
        """Return how many tokens each sequence may have in one step."""
        return max(2, self._sizes.max_num_batched_tokens // max(1, num_seqs))

    def draft(self, batch: Batch, slots: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
        """Draft tokens, one step of the draft model for each token of the longest draft."""
        drafts: list[list[int]] = [[] for _ in slots]
        for slot in slots:
            state = self._slots[slot]
            state.num_known, state.drafted = int(batch.num_known[slot]), ()
        places = [self._place(batch, slot) for slot in slots]
        try:
            self._go_on(batch, slots, counts, places, drafts)
        finally:  # a place in a grammar is where the sequence is, whatever happens
            for place, ids in zip(places, drafts, strict=True):
                if place is not None and ids:
                    place.matcher.rollback(len(ids))
        for slot, ids in zip(slots, drafts, strict=True):
            self._slots[slot].drafted = tuple(ids)
            if ids:
                self._slots[slot].num_computed = int(batch.num_known[slot]) + len(ids) - 1
        return drafts

    def _go_on(
        self,
        batch: Batch,
        slots: Sequence[int],
        counts: Sequence[int],
        places: Sequence[Constraint | None],
        drafts: list[list[int]],
    ) -> None:
        """Append tokens to the drafts, one in each step, and go on with them in the grammars."""
        for depth in range(max(counts)):
            rows = [row for row, count in enumerate(counts) if count > depth == len(drafts[row])]
            rows = [row for row in rows if (place := places[row]) is None or not place.matcher.is_ended]
            if not rows:
                break
            begun = time.perf_counter()
            held = [places[row] for row in rows]
            found = self._step(batch, [slots[row] for row in rows], [drafts[row][-1:] for row in rows], depth, held)
            self._depth_seconds += LEARNING * (time.perf_counter() - begun - self._depth_seconds)
            for place, row, token in zip(held, rows, found.tolist(), strict=True):
                if place is None or place.matcher.accept(token):
                    drafts[row].append(token)

    def close(self) -> None:
        """Close the draft model's runner."""
        self._runner.close()

    def _settle(self, batch: Batch, slot: int) -> _Slot:
        """Return a slot's place, after what became of its last drafts, or of a sequence that is new there."""
        state, seq = self._slots[slot], batch.seqs[slot]
        assert seq is not None and self._table is not None
        if state.seq is not seq or state.num_preemptions != seq.num_preemptions:
            state = self._slots[slot] = _Slot(seq, seq.num_preemptions)
            limit = (int(batch.num_known[slot]) - 1) // self._sizes.block_size
            for block, name in zip(self._table[slot].tolist(), seq.hashes[:limit], strict=False):
                if not block or self._content.get(block) != name:
                    break
                state.num_named += 1
            state.num_computed = state.num_named * self._sizes.block_size
        elif state.drafted:
            chosen = batch.tokens[slot, state.num_known : state.num_known + len(state.drafted)].tolist()
            right = next((at for at, token in enumerate(state.drafted) if chosen[at] != token), len(state.drafted))
            known = int(batch.num_known[slot])
            state.num_computed = min(state.num_known + min(right, len(state.drafted) - 1), known - 1)
            state.drafted = ()
        self._name_blocks(state, slot)
        return state

    def _name_blocks(self, state: _Slot, slot: int) -> None:
        """Note what the blocks have that were computed to their end."""
        assert state.seq is not None and self._table is not None
        end = min(state.num_computed // self._sizes.block_size, len(state.seq.hashes))
        for index in range(state.num_named, end):
            self._content[int(self._table[slot, index])] = state.seq.hashes[index]
        state.num_named = max(state.num_named, end)

    def _compute(self, batch: Batch, behind: Sequence[tuple[int, int]]) -> None:
        """Compute the next tokens of some sequences, without sampling."""
        slots = [slot for slot, _ in behind]
        texts = []
        for slot, count in behind:
            start = self._slots[slot].num_computed
            texts.append((start, batch.tokens[slot, start : start + count]))
            self._forget(slot, start, start + count)
        self._run(batch, slots, texts, None)
        for slot, count in behind:
            self._slots[slot].num_computed += count
            self._name_blocks(self._slots[slot], slot)

    def _place(self, batch: Batch, slot: int) -> Constraint | None:
        """Return where a sequence is in its grammar, if it has one and both models have as many tokens."""
        if self._grammars is None or self._grammars.vocab_size != self._sizes.vocab_size:
            return None
        return self._grammars.place(batch, slot)

    def _step(
        self,
        batch: Batch,
        slots: list[int],
        last: list[list[int]],
        depth: int,
        places: Sequence[Constraint | None],
    ) -> I32:
        """Run one step for each slot over the token that was drafted last, or over all that it lacks; sample one."""
        texts: list[tuple[int, I32]] = []
        for slot, ids in zip(slots, last, strict=True):
            known = int(batch.num_known[slot])
            if depth:
                texts.append((known + depth - 1, np.array(ids, np.int32)))
            else:
                start = self._slots[slot].num_computed
                texts.append((start, batch.tokens[slot, start:known]))
            self._forget(slot, texts[-1][0], known + depth)
        counters = batch.num_known[slots] - batch.prompt_len[slots] + depth
        rows = batch.draft_rows(np.array(slots, np.int64), counters.astype(np.uint64), self._sizes.vocab_size)
        masks = FixedMasks(places, self._sizes.vocab_size) if any(places) else None
        return self._run(batch, slots, texts, rows, masks)

    def _forget(self, slot: int, start: int, end: int) -> None:
        """Forget the content of the blocks that are written to."""
        assert self._table is not None
        size = self._sizes.block_size
        for index in range(start // size, (end - 1) // size + 1):
            self._content.pop(int(self._table[slot, index]), None)

    def _run(
        self,
        batch: Batch,
        slots: list[int],
        texts: list[tuple[int, I32]],
        rows: SampleRows | None,
        masks: FixedMasks | None = None,
    ) -> I32:
        """Run a step over some tokens of each slot, from a position on; return the ids sampled behind them, if any."""
        assert self._table is not None
        size, groups = self._sizes.block_size, self._sizes.num_groups
        lengths: I64 = np.array([len(ids) for _, ids in texts], np.int64)
        starts: I64 = np.array([start for start, _ in texts], np.int64)
        query_start_loc = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(lengths, out=query_start_loc[1:])
        ids = np.concatenate([ids for _, ids in texts]).astype(np.int32)
        row_slots = np.repeat(np.array(slots, np.int64), lengths)
        positions = np.arange(len(ids)) + np.repeat(starts - query_start_loc[:-1], lengths)
        block = positions // size
        slot_mapping = positions + (self._table[row_slots, block].astype(np.int64) - block) * size
        ends = starts + lengths
        table = self._table[slots, : -(-int(ends.max()) // size)]
        none: I32 = np.zeros(0, np.int32)
        sample = SampleRows.greedy(none) if rows is None else rows
        self._runner.submit(
            StepPlan(
                token_ids=np.minimum(ids, self._sizes.vocab_size - 1),
                positions=positions,
                query_start_loc=query_start_loc,
                seq_lens=ends.astype(np.int32),
                seq_slots=np.array(slots, np.int32),
                logits_rows=none if rows is None else query_start_loc[1:] - 1,
                slot_mapping=(slot_mapping,) * groups,
                block_tables=(table,) * groups,
                sample=sample,
                masks=masks,
            )
        )
        result = self._runner.wait()
        if result.error is not None:
            raise InfercError(f"the step of the draft model failed: {result.error}")
        return result.token_ids
