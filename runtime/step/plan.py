"""What one step is asked for and what it returns: the plan the scheduler makes and the runner runs.

Everything is a numpy array over the flattened batch. T is the number of tokens of the step, B of its sequences, S of
the rows that are sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U64 = NDArray[np.uint64]
Rows = NDArray[np.generic]  # [T, hidden_size], bfloat16 as its bits


@dataclass
class TokenLists:
    """A list of token ids for every row (CSR): row i owns `[starts[i], starts[i + 1])`. No ids at all: starts is empty."""

    starts: I32 = field(default_factory=lambda: np.zeros(0, np.int32))
    token_ids: I32 = field(default_factory=lambda: np.zeros(0, np.int32))
    values: F32 = field(default_factory=lambda: np.zeros(0, np.float32))  # one per id for logit_bias, else empty

    @staticmethod
    def of(rows: Sequence[I32], values: Sequence[F32] = ()) -> TokenLists:
        """From one array of ids per row, and their values if they have any."""
        if not any(len(row) for row in rows):
            return TokenLists()
        starts = np.zeros(len(rows) + 1, np.int32)
        np.cumsum([len(row) for row in rows], out=starts[1:])
        return TokenLists(starts, np.concatenate(rows), np.concatenate(values) if values else np.zeros(0, np.float32))


@dataclass
class SampleRows:
    """How to sample each of the S logits rows: a structure of arrays, all of length S.

    Greedy is temperature 0. A row's random numbers are Philox at (seed, counter): the row's result does not depend on
    the rest of the batch. num_logprobs 0 asks for none; n asks for the chosen token's and the n most likely ones.
    Penalties read the per-slot counts that `ModelRunner.reset_slot` started and sampling keeps up.
    """

    seq_slots: I32
    temperature: F32
    top_k: I32  # 0: off
    top_p: F32  # 1: off
    min_p: F32  # 0: off
    repetition_penalty: F32  # 1: off; over prompt and output
    presence_penalty: F32  # 0: off; over output
    frequency_penalty: F32  # 0: off; over output
    seeds: U64
    counters: U64  # index of the token among the sequence's output
    num_logprobs: I32
    logit_bias: TokenLists = field(default_factory=TokenLists)
    banned: TokenLists = field(default_factory=TokenLists)
    allowed: TokenLists = field(default_factory=TokenLists)  # rising ids; a row with none allows all

    def __len__(self) -> int:
        return len(self.seq_slots)

    def with_counters(self, counters: U64) -> SampleRows:
        """These rows at other places of their sequences; the arrays are shared."""
        rows = object.__new__(SampleRows)
        rows.__dict__.update(self.__dict__, counters=counters)
        return rows

    @staticmethod
    def greedy(seq_slots: I32) -> SampleRows:
        """Rows that take the most likely token (the lower id of equal ones)."""
        n = len(seq_slots)

        def floats(value: float) -> F32:
            return np.full(n, value, np.float32)

        return SampleRows(
            seq_slots=np.asarray(seq_slots, np.int32),
            temperature=floats(0),
            top_k=np.zeros(n, np.int32),
            top_p=floats(1),
            min_p=floats(0),
            repetition_penalty=floats(1),
            presence_penalty=floats(0),
            frequency_penalty=floats(0),
            seeds=np.zeros(n, np.uint64),
            counters=np.zeros(n, np.uint64),
            num_logprobs=np.zeros(n, np.int32),
        )


def _no_rows() -> I32:
    return np.zeros(0, np.int32)


def _no_long_rows() -> I64:
    return np.zeros(0, np.int64)


@dataclass(frozen=True)
class Copies:
    """K and V of slots (or of whole blocks) of one KV group, in every layer, to others of it."""

    source: I64
    target: I64


@dataclass(frozen=True)
class ScoredQueries:
    """The queries of a step by whose attention blocks are scored, and where the scores are to be added.

    first_rows [B] i32: of each of the step's sequences the first row that counts, or the one behind its last
    scores: per KV group [B, max_blocks] i64, as the compiled step fills them in (`StepArgs`), or None where nothing is chosen
    seqs, slots, turns [n] i64: the sequences that have such rows, their slots, and whether their stride is an odd one
    columns: per KV group [n, max_blocks] i64, which of its sequence's blocks stands in a column of the step's block table
    """

    first_rows: I32
    scores: tuple[I64 | None, ...]
    seqs: I64
    slots: I64
    turns: I64
    columns: tuple[I64 | None, ...]


@dataclass
class StepPlan:
    """One step. Prefill, chunks and decode are one thing: sequence b owns rows [query_start_loc[b], query_start_loc[b + 1])."""

    token_ids: I32  # [T]
    positions: I64  # [T]
    query_start_loc: I32  # [B + 1]
    seq_lens: I32  # [B] context, this step included
    seq_slots: I32  # [B]
    logits_rows: I32  # [S] rows of [0, T) that are sampled
    slot_mapping: tuple[I64, ...]  # per KV group [T]
    block_tables: tuple[I32, ...]  # per KV group [B, max_blocks]
    sample: SampleRows
    late_rows: I32 = field(default_factory=_no_rows)  # [L] rows of token_ids still unknown here: the runner fills in
    late_slots: I32 = field(default_factory=_no_rows)  # [L] the id last sampled for this slot
    loads: tuple[Copies, ...] = ()  # per KV group, blocks from the lower tier to the arena, before anything else
    copies: tuple[Copies, ...] = ()  # per KV group, before anything is computed; none at all: ()
    wants_logprobs: bool = False  # of the chosen tokens of all rows, whatever `sample` asks for
    tapped_rows: I64 = field(default_factory=_no_long_rows)  # rising, of [0, T): whose values the taps keep
    scored: ScoredQueries | None = None  # the queries by whose attention blocks are scored; the step adds to its scores

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def tapped_logits(self) -> I64:
        """Which of the logits rows are among the tapped ones: rising, of [0, S)."""
        is_tapped = np.zeros(self.num_tokens, np.bool_)
        is_tapped[self.tapped_rows] = True
        return np.flatnonzero(is_tapped[self.logits_rows])

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)


@dataclass(frozen=True)
class Logprobs:
    """Log-softmax of one row's raw logits."""

    token_id: int  # the chosen one
    logprob: float
    rank: int  # of the chosen one, from 1
    top: tuple[tuple[int, float], ...]  # (token id, logprob), falling


@dataclass(frozen=True)
class StepResult:
    """token_ids [S] i32 in the order of `logits_rows`; logprobs per row, None where not asked for (or nowhere).

    failed [S] marks rows whose logits, after penalties and masks, held no finite largest value: their ids mean nothing.
    None if there are none. chosen_logprobs [S] where the plan wants them. tapped: values of the plan's
    tapped rows by node, or of the logits rows among them.
    """

    token_ids: I32
    logprobs: list[Logprobs | None] | None = None
    failed: NDArray[np.bool_] | None = None
    hidden: Rows | None = None  # what a pipeline stage without the LM head hands on, instead of ids
    error: str | None = None  # the step failed: nothing else is valid
    chosen_logprobs: F32 | None = None
    tapped: dict[str, NDArray[Any]] | None = None
