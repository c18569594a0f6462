"""The running sequences as a structure of arrays, by slot, and the step plan that is made from it.

A decode-only step is a handful of numpy calls over all slots; Python code handles a single sequence only when it joins
or leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from inferc.runtime.kv_cache.manager import KVCacheManager
from inferc.runtime.rules.dry import Penalties
from inferc.runtime.rules.rules import Rules
from inferc.runtime.scheduler.tree_rows import PlacedTree, add_branches, rows_of_trees
from inferc.runtime.scheduler.waiting_queue import key_of
from inferc.runtime.step.cost import StepWork
from inferc.runtime.step.plan import F32, F64, I32, I64, U64, SampleRows, StepPlan, TokenLists
from inferc.runtime.step.processors import ProcessedRow, ProcessedRows, Processors
from inferc.runtime.step.sequence import Sequence

Bool = NDArray[np.bool_]

# The most end tokens of a sequence that are compared as arrays; if it has more, they are looked up in its set.
FEW_STOP_IDS = 4
SPARE_BLOCKS = 16  # the spare columns of new block tables


@dataclass
class _Lists:
    """The token ids that a sequence's sampling parameters name, as arrays; `allowed` is ascending."""

    bias_ids: I32
    bias_values: F32
    allowed: I32
    banned: I32
    banned_early: I32  # banned while fewer than `min_tokens` are out: includes end tokens


_NO_IDS = np.zeros(0, np.int32)
_NO_PLACES = np.zeros(0, np.int64)
_NO_TREES: Mapping[int, PlacedTree] = {}
_NO_LISTS = _Lists(_NO_IDS, np.zeros(0, np.float32), _NO_IDS, _NO_IDS, _NO_IDS)


@dataclass
class _Tables:
    """The block tables of the slots of a shape, and the slots whose rows have changed since their last use."""

    width: int = 0
    of_groups: tuple[I32, ...] = ()
    stale: list[list[int]] = field(default_factory=list)


@dataclass
class _Shape:
    """The parts of a plan that depend only on which sequences compute how many tokens.

    They stay the same while the sequences only decode.
    """

    seq_slots: I32
    query_start_loc: I32
    row_slots: I64  # slot of each row
    sampled: I64  # slot of each row that is sampled
    places: I64  # of each of these, how many rows of its sequence are before it; empty if each has one
    logits_rows: I32
    num_drafted: I32  # as in StepPlan
    sample: SampleRows  # without counters, and without the end tokens that are banned at first
    has_min_output: bool
    adapter_ids: I32  # as in StepPlan
    parents: I32 = field(default_factory=lambda: _NO_IDS)  # as in StepTree; empty if all drafts are chains
    ways: list[list[int]] | None = None  # of each sampled row the drafted tokens before it, if any drafts are trees
    row_of: I64 | None = None  # [num_slots] the row of each slot in the shape; only if block tables are kept
    tables: tuple[_Tables, _Tables] = field(default_factory=lambda: (_Tables(), _Tables()))
    turn: int = 0


@dataclass(frozen=True)
class Rows:
    """The sequences that a step's tokens belong to.

    Decode steps between which no sequence joins or leaves have the same rows.
    """

    seq_slots: I32  # the plan's array
    slots: I64
    seqs: list[Sequence]
    stop_ids: I32  # [FEW_STOP_IDS, S]
    many_stops: list[int]  # rows of sequences with more than FEW_STOP_IDS end tokens
    max_total: I64
    first_len: I64  # the length including the first sampled token

    def stopped(self, ids: I32) -> Bool:
        """Return which of the ids that a step sampled, [S], are end tokens of the sequences that they belong to."""
        stopped: Bool = (self.stop_ids == ids).any(axis=0)
        for row in self.many_stops:
            stopped[row] = int(ids[row]) in self.seqs[row].stop_ids
        return stopped


class Batch:
    """The state per slot that steps read and advance.

    num_tokens    length, including tokens that a step in flight is sampling
    tokens        [num_slots, max_model_len + 1] ids of each sequence
    logprobs      like `tokens`, of the tokens that were sampled while it ran; None if no request wants them
    num_known     number of tokens that have reached the host
    num_computed  number of tokens whose K and V are in the cache once the steps in flight are done
    last_step     number of the last step that the slot took part in
    predicted     length at which the sequence is expected to end
    num_found     number of tokens that were in the cache when it joined
    changes_at    output length at which its rank may change
    is_running    whether the slot is in `order`
    tbt           the average seconds between two of its tokens that it asks for, or inf
    first_at      when its first token landed, on the scheduler's clock, or inf
    order         slots of the running sequences, by level, rank and arrival
    """

    def __init__(self, num_slots: int, max_model_len: int, keep_logprobs: bool = False) -> None:
        def counts() -> I64:
            return np.zeros(num_slots, np.int64)

        def floats() -> F32:
            return np.zeros(num_slots, np.float32)

        self.seqs: list[Sequence | None] = [None] * num_slots
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self.order: I64 = np.zeros(0, np.int64)
        self.num_tokens, self.num_known, self.num_computed = counts(), counts(), counts()
        self.prompt_len, self.max_total, self.last_step, self.min_output = counts(), counts(), counts(), counts()
        self.predicted, self.num_found, self.changes_at, self.clients = counts(), counts(), counts(), counts()
        # A row becomes resident memory only when it is written.
        self.tokens: I32 = np.zeros((num_slots, max_model_len + 1), np.int32)
        self.logprobs: F32 | None = np.zeros(self.tokens.shape, np.float32) if keep_logprobs else None
        self.is_running: Bool = np.zeros(num_slots, np.bool_)
        self.tbt: F64 = np.full(num_slots, np.inf)
        self.first_at: F64 = np.full(num_slots, np.inf)
        self.stop_ids: I32 = np.full((FEW_STOP_IDS, num_slots), -1, np.int32)  # of sequences with at most FEW_STOP_IDS
        self.temperature, self.top_p, self.min_p = floats(), floats(), floats()
        self.typical_p, self.xtc_probability, self.xtc_threshold = floats(), floats(), floats()
        self.repetition, self.presence, self.frequency = floats(), floats(), floats()
        self.top_k: I32 = np.zeros(num_slots, np.int32)
        self.num_logprobs: I32 = np.zeros(num_slots, np.int32)
        self.seeds: U64 = np.zeros(num_slots, np.uint64)
        self.adapters: I32 = np.zeros(num_slots, np.int32)
        self._lists: dict[int, _Lists] = {}  # only slots that have any
        self._rules: dict[int, Rules] = {}  # only running slots that have any
        self._processors: dict[int, Processors] = {}  # only running slots that have any
        self._rows: Rows | None = None  # those of the last step that landed
        self._decode_shape: _Shape | None = None  # that of all slots in `order`; None after one joined or left

    def join(self, seq: Sequence, num_computed: int = 0) -> int:
        """Give a waiting sequence a slot and its place in `order`.

        num_computed: the number of its tokens that are in the cache.
        """
        slot = seq.slot = self.free_slots.pop()
        self.seqs[slot] = seq
        last = self.seqs[self.order[-1]] if len(self.order) else None
        self.order = np.append(self.order, slot)
        self._decode_shape = None
        if last is not None and key_of(seq) < key_of(last):
            self.sort()
        length = len(seq.token_ids)
        self.tokens[slot, :length] = seq.token_ids
        self.is_running[slot] = True
        self.num_tokens[slot] = self.num_known[slot] = length
        self.num_computed[slot] = self.num_found[slot] = num_computed
        self.clients[slot] = seq.client
        self.tbt[slot] = np.inf if seq.params.tbt_ms is None or seq.is_lost else seq.params.tbt_ms / 1000
        self.first_at[slot] = seq.first_at
        self.prompt_len[slot], self.max_total[slot] = seq.prompt_len, seq.max_total
        self._set_stop_ids(slot, seq)
        self._set_params(slot, seq)
        return slot

    def sort(self) -> None:
        """Sort the running sequences after a rank has changed."""
        running = [(key_of(seq), slot) for slot in self.order.tolist() if (seq := self.seqs[slot]) is not None]
        self.order = np.array([slot for _, slot in sorted(running)], np.int64)
        self._decode_shape = None

    def leave(self, slot: int) -> None:
        """Remove a sequence from the running ones; its slot stays reserved until `free`."""
        self.sync(slot)
        self.is_running[slot] = False
        self._rules.pop(slot, None)
        self._processors.pop(slot, None)
        self.order = self.order[self.order != slot]
        self._decode_shape = None

    def sync(self, slot: int) -> None:
        """Bring the sequence's own lists of tokens and log probabilities up to date."""
        seq = self.seqs[slot]
        assert seq is not None
        seq.token_ids += self.tokens[slot, len(seq.token_ids) : self.num_known[slot]].tolist()
        if self.logprobs is not None:
            start = seq.prompt_len + len(seq.logprobs)
            seq.logprobs += self.logprobs[slot, start : self.num_known[slot]].tolist()

    def advance(self, slot: int, token_ids: list[int], logprobs: F32 | None, rows: list[int]) -> int:
        """Append the tokens that a step with drafts gave a slot, and return how many tokens it has now.

        logprobs: of all rows of the step. rows: those of these tokens. No step may be in flight.
        """
        known = int(self.num_known[slot])
        end = known + len(token_ids)
        self.tokens[slot, known:end] = token_ids
        if self.logprobs is not None and logprobs is not None:
            self.logprobs[slot, known:end] = logprobs[rows]
        self.num_known[slot] = self.num_tokens[slot] = end
        self.num_computed[slot] = end - 1
        return end

    def free(self, slot: int) -> None:
        self.seqs[slot] = None
        self._lists.pop(slot, None)
        self.free_slots.append(slot)

    def last_first(self) -> Iterator[Sequence]:
        """Yield the running sequences in reverse order."""
        return (seq for slot in reversed(self.order.tolist()) if (seq := self.seqs[slot]) is not None)

    @property
    def has_rules(self) -> bool:
        """True if a running sequence has rules, for which all of its tokens must be known when a step is planned.

        Logits processors are among them.
        """
        return bool(self._rules or self._processors)

    def num_allowed(self, slot: int, token_ids: list[int]) -> int:
        """Return how many of some tokens behind those of a slot its rules allow; no step may be in flight."""
        if (rules := self._rules.get(slot)) is None:
            return len(token_ids)
        known = int(self.num_known[slot])
        self.tokens[slot, known : known + len(token_ids)] = token_ids
        for count, token in enumerate(token_ids):
            if token in rules.banned(self.tokens[slot, : known + count]):
                return count
        return len(token_ids)

    def decoding(self) -> I64:
        """Return the slots of the running sequences that have their first token."""
        return self.order[self.num_known[self.order] > self.prompt_len[self.order]]

    def decode_work(self, slots: I64) -> StepWork:
        """Return the work of a step that decodes one token for each of these slots."""
        return StepWork(len(slots), len(slots), float(self.num_tokens[slots].sum()))

    def due(self, slots: I64) -> F64:
        """Return when the next token of each slot is due for it to keep to its `tbt` on average.

        It is inf if the sequence asks for no `tbt` or has no token yet.
        """
        count = self.num_known[slots] - self.prompt_len[slots]
        is_asked = np.isfinite(self.tbt[slots]) & (count > 0)
        due: F64 = np.where(is_asked, self.first_at[slots] + count * np.where(is_asked, self.tbt[slots], 0.0), np.inf)
        return due

    def _set_stop_ids(self, slot: int, seq: Sequence) -> None:
        self.stop_ids[:, slot] = -1
        if len(seq.stop_ids) <= FEW_STOP_IDS:
            self.stop_ids[: len(seq.stop_ids), slot] = sorted(seq.stop_ids)

    def _set_params(self, slot: int, seq: Sequence) -> None:
        params = seq.params
        self.temperature[slot], self.top_k[slot] = params.temperature, params.top_k
        self.top_p[slot], self.min_p[slot] = params.top_p, params.min_p
        self.typical_p[slot], self.xtc_probability[slot] = params.typical_p, params.xtc_probability
        self.xtc_threshold[slot] = params.xtc_threshold
        self.repetition[slot] = params.repetition_penalty
        self.presence[slot], self.frequency[slot] = params.presence_penalty, params.frequency_penalty
        self.seeds[slot] = seq.seed
        self.adapters[slot] = seq.adapter
        # The runner takes 0 as "no log probabilities", so a request for the chosen token's alone asks for one.
        self.num_logprobs[slot] = 0 if params.logprobs is None else max(params.logprobs, 1)
        self.min_output[slot] = params.min_tokens
        self._lists.pop(slot, None)
        if (rules := Rules.of(params)) is not None:
            self._rules[slot] = rules
        if params.logits_processors:
            self._processors[slot] = Processors(params.logits_processors)
        never = params.never_chosen
        if params.logit_bias or params.allowed_token_ids or never or params.min_tokens:
            self._lists[slot] = _Lists(
                bias_ids=np.array(list(params.logit_bias), np.int32),
                bias_values=np.array(list(params.logit_bias.values()), np.float32),
                allowed=np.unique(np.array(params.allowed_token_ids, np.int32)),
                banned=np.unique(np.array(never, np.int32)),
                banned_early=np.unique(np.array((*never, *seq.stop_ids), np.int32)),
            )

    def rows_of(self, seq_slots: I32) -> Rows:
        """Return the slots of a step and their sequences.

        A slot stays reserved for its sequence until its last step has landed.
        """
        if self._rows is None or self._rows.seq_slots is not seq_slots:
            slots = seq_slots.astype(np.int64)
            seqs = [seq for slot in slots.tolist() if (seq := self.seqs[slot]) is not None]
            assert len(seqs) == len(slots), "a slot has lost its sequence"
            many_stops = [row for row, seq in enumerate(seqs) if len(seq.stop_ids) > FEW_STOP_IDS]
            limits = self.stop_ids[:, slots], many_stops, self.max_total[slots], self.prompt_len[slots] + 1
            self._rows = Rows(seq_slots, slots, seqs, *limits)
        return self._rows

    def plan(
        self,
        slots: I64,
        num_new: I64,
        cache: KVCacheManager,
        step: int,
        drafted: I64 | None = None,
        placed: Mapping[int, PlacedTree] = _NO_TREES,
    ) -> StepPlan:
        """Make the plan that computes the next `num_new` tokens of each of `slots`, and advance the state accordingly.

        A sequence whose last token is among them samples one more token, which is counted from now on.
        drafted [B]: how many of the new tokens are drafted, and stand behind the others in `tokens`; None if none is.
        They are not counted until the step has landed. placed: by slot, the trees of which these are the chains.
        """
        start = self.num_computed[slots]
        end = start + num_new
        complete = end == (self.num_tokens[slots] if drafted is None else self.num_tokens[slots] + drafted)
        all_decode = drafted is None and np.count_nonzero(num_new == 1) == np.count_nonzero(complete) == len(slots)
        if all_decode and slots is self.order:
            shape = self._decode_shape = self._decode_shape or self._shape(slots, num_new, complete)
        else:
            shape, self._decode_shape = self._shape(slots, num_new, complete, drafted, placed), None
            cache.take_changed()
        positions = start
        if not all_decode:
            positions = np.arange(len(shape.row_slots)) + np.repeat(start - shape.query_start_loc[:-1], num_new)
        block = positions // cache.block_size
        forgetting = cache.forgetting
        seen = end - forgetting.num_forgotten(slots)
        max_blocks = cache.blocks_for(max(int(seen.max()), *(each.end for each in placed.values()), 0))
        pending_rows, pending_slots = self._pending(slots, shape)
        plan = StepPlan(
            token_ids=self.tokens[slots, start]
            if all_decode
            else self._token_ids(slots, start, end, shape.query_start_loc),
            positions=positions,
            query_start_loc=shape.query_start_loc,
            seq_lens=seen.astype(np.int32),
            seq_slots=shape.seq_slots,
            logits_rows=shape.logits_rows,
            slot_mapping=tuple(
                positions + (table[shape.row_slots, block] - block) * cache.block_size for table in cache.tables
            ),
            block_tables=self._block_tables(slots, shape, cache, max_blocks, end - seen),
            sample=self._sample_rows(slots if all_decode else shape.sampled, shape),
            pending_rows=pending_rows,
            pending_slots=pending_slots,
            wants_logprobs=self.logprobs is not None,
            scored=forgetting.scored_queries(slots, start, end, shape.query_start_loc, max_blocks),
            num_drafted=shape.num_drafted,
            adapter_ids=shape.adapter_ids,
            processed=self._processed(slots if all_decode else shape.sampled, shape) if self._processors else None,
        )
        if placed:
            add_branches(plan, placed, shape.parents, cache.block_size)
        self.num_computed[slots] = end
        self.num_tokens[slots] += complete
        self.last_step[slots] = step
        return plan

    def draft_rows(self, slots: I64, counters: U64, vocab_size: int) -> SampleRows:
        """Return rows by which a draft model chooses the next token of each slot, at these counters.

        They are those of the sequences without penalties and log probabilities. vocab_size: the draft model's.
        """
        rows = self._gather(slots)
        ones, zeros = np.ones(len(slots), np.float32), np.zeros(len(slots), np.float32)
        rows.repetition_penalty, rows.presence_penalty, rows.frequency_penalty = ones, zeros, zeros
        rows.num_logprobs = np.zeros(len(slots), np.int32)
        rows.counters = counters
        if any((lists.token_ids >= vocab_size).any() for lists in (rows.logit_bias, rows.banned, rows.allowed)):
            rows.logit_bias = rows.banned = rows.allowed = TokenLists()
        return rows

    def _block_tables(
        self, slots: I64, shape: _Shape, cache: KVCacheManager, max_blocks: int, forgotten: I64
    ) -> tuple[I32, ...]:
        if cache.forgetting.moves_blocks:
            cache.take_changed()
            return cache.forgetting.block_tables(slots, forgotten, max_blocks)
        if shape is self._decode_shape:
            return self._tables(shape, cache, max_blocks)
        return tuple(table[:, :max_blocks][slots] for table in cache.tables)

    def _tables(self, shape: _Shape, cache: KVCacheManager, max_blocks: int) -> tuple[I32, ...]:
        """Return the block tables of all running sequences, which are kept between steps: only changed rows are copied.

        There are two of each, because the step in flight still reads its own.
        """
        changed = cache.take_changed()
        for tables in shape.tables:
            tables.stale.append(changed)
        tables = shape.tables[shape.turn]
        shape.turn ^= 1
        if max_blocks > tables.width:
            tables.width = min(cache.tables[0].shape[1], max_blocks + SPARE_BLOCKS)
            tables.of_groups = tuple(table[shape.row_slots, : tables.width] for table in cache.tables)
        else:
            stale = {slot for each in tables.stale for slot in each}
            slots = np.fromiter(stale, np.int64, len(stale))
            slots = slots[self.is_running[slots]]
            if len(slots):
                if shape.row_of is None:
                    shape.row_of = np.zeros(len(self.seqs), np.int64)
                    shape.row_of[shape.row_slots] = np.arange(len(shape.row_slots))
                rows = shape.row_of[slots]
                for kept, table in zip(tables.of_groups, cache.tables, strict=True):
                    kept[rows] = table[slots, : tables.width]
        tables.stale = []
        return tables.of_groups

    def _shape(
        self,
        slots: I64,
        num_new: I64,
        complete: Bool,
        drafted: I64 | None = None,
        placed: Mapping[int, PlacedTree] = _NO_TREES,
    ) -> _Shape:
        query_start_loc = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(num_new, out=query_start_loc[1:])
        sampled, logits_rows = slots[complete], query_start_loc[1:][complete] - 1
        num_drafted, places, parents, ways = _NO_IDS, _NO_PLACES, _NO_IDS, None
        if drafted is not None and placed:
            known = self.num_known[sampled].tolist()
            chains = [
                self.tokens[slot, at : at + count].tolist()
                for slot, at, count in zip(sampled.tolist(), known, drafted[complete].tolist(), strict=True)
            ]
            found = rows_of_trees(placed, sampled, logits_rows, chains, int(query_start_loc[-1]))
            sampled, places, logits_rows = found.slots, found.places, found.logits_rows
            num_drafted, parents, ways = found.num_drafted, found.parents, found.ways
        elif drafted is not None:
            num_drafted = drafted[complete].astype(np.int32)
            counts = num_drafted + 1
            places = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
            sampled = sampled.repeat(counts)
            logits_rows = ((logits_rows - num_drafted).repeat(counts) + places).astype(np.int32)
        return _Shape(
            seq_slots=slots.astype(np.int32),
            query_start_loc=query_start_loc,
            row_slots=np.repeat(slots, num_new),
            sampled=sampled,
            places=places,
            logits_rows=logits_rows,
            num_drafted=num_drafted,
            parents=parents,
            ways=ways,
            sample=self._gather(sampled),
            has_min_output=bool(self.min_output[sampled].any()),
            adapter_ids=self.adapters[slots] if self.adapters[slots].any() else _NO_IDS,
        )

    def _pending(self, slots: I64, shape: _Shape) -> tuple[I32, I32]:
        """Return the rows whose token id is still being sampled, and their slots."""
        is_pending = self.num_tokens[slots] > self.num_known[slots]
        count = np.count_nonzero(is_pending)
        if count == len(slots) == len(shape.row_slots):
            return shape.logits_rows, shape.seq_slots
        return shape.query_start_loc[1:][is_pending] - 1, shape.seq_slots[is_pending]

    def _token_ids(self, slots: I64, start: I64, end: I64, query_start_loc: I32) -> I32:
        ids = self.tokens[slots, end - 1].repeat(end - start)
        for i in np.flatnonzero(end - start > 1).tolist():
            ids[query_start_loc[i] : query_start_loc[i + 1]] = self.tokens[slots[i], start[i] : end[i]]
        return ids

    def _sample_rows(self, slots: I64, shape: _Shape) -> SampleRows:
        counters = self.num_tokens[slots] - self.prompt_len[slots]
        if len(shape.places):
            counters += shape.places
        rows = shape.sample.with_counters(counters.astype(np.uint64))
        if shape.has_min_output:
            early = counters < self.min_output[slots]
            if early.any():  # end tokens are banned until `min_tokens` are out
                lists = [self._lists.get(slot, _NO_LISTS) for slot in slots.tolist()]
                rows.banned = TokenLists.of(
                    [
                        each.banned_early if is_early else each.banned
                        for each, is_early in zip(lists, early.tolist(), strict=True)
                    ]
                )
        if self._rules:
            self._obey_rules(slots, shape, rows)
        return rows

    def _obey_rules(self, slots: I64, shape: _Shape, rows: SampleRows) -> None:
        """Add to the rows what the rules of their sequences say, given the tokens before each of them."""
        places = shape.places.tolist() or [0] * len(slots)
        banned: dict[int, I32] = {}
        penalties: dict[int, Penalties] = {}
        for row, (slot, place) in enumerate(zip(slots.tolist(), places, strict=True)):
            if (rules := self._rules.get(slot)) is not None:
                assert self.num_tokens[slot] == self.num_known[slot], "a step in flight samples what a rule depends on"
                before = self._before(shape, row, slot, place)
                banned[row], penalties[row] = rules.banned(before), rules.penalties(before)
        rows.banned = rows.banned.with_more(len(slots), banned)
        added = {row: (each.token_ids, each.values) for row, each in penalties.items() if len(each.token_ids)}
        rows.logit_bias = rows.logit_bias.with_added(len(slots), added)

    def _processed(self, slots: I64, shape: _Shape) -> ProcessedRows | None:
        """Return the rows that logits processors change, with the tokens before each of them."""
        places = shape.places.tolist() or [0] * len(slots)
        rows = {
            row: ProcessedRow(processors, self._before(shape, row, slot, place).copy(), int(self.prompt_len[slot]))
            for row, (slot, place) in enumerate(zip(slots.tolist(), places, strict=True))
            if (processors := self._processors.get(slot)) is not None
        }
        return ProcessedRows(rows) if rows else None

    def _before(self, shape: _Shape, row: int, slot: int, place: int) -> I32:
        """Return the tokens before a sampled row: those of its slot, and `place` drafted ones."""
        length = int(self.num_tokens[slot])
        if shape.ways is None:
            return self.tokens[slot, : length + place]
        return np.concatenate((self.tokens[slot, :length], np.array(shape.ways[row], np.int32)))

    def _gather(self, slots: I64) -> SampleRows:
        bias = allowed = banned = TokenLists()
        if self._lists:
            lists = [self._lists.get(slot, _NO_LISTS) for slot in slots.tolist()]
            bias = TokenLists.of([each.bias_ids for each in lists], [each.bias_values for each in lists])
            allowed = TokenLists.of([each.allowed for each in lists])
            banned = TokenLists.of([each.banned for each in lists])
        return SampleRows(
            logit_bias=bias,
            allowed=allowed,
            banned=banned,
            seq_slots=slots.astype(np.int32),
            temperature=self.temperature[slots],
            top_k=self.top_k[slots],
            top_p=self.top_p[slots],
            min_p=self.min_p[slots],
            typical_p=self.typical_p[slots],
            xtc_probability=self.xtc_probability[slots],
            xtc_threshold=self.xtc_threshold[slots],
            repetition_penalty=self.repetition[slots],
            presence_penalty=self.presence[slots],
            frequency_penalty=self.frequency[slots],
            seeds=self.seeds[slots],
            counters=np.zeros(len(slots), np.uint64),
            num_logprobs=self.num_logprobs[slots],
        )
