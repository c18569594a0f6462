"""The plan that the scheduler makes of one step and the runner runs, and the result of the step.

Everything is a numpy array over the flattened batch. T is the number of tokens of the step, B of its sequences, S of
the rows that are sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
Rows = NDArray[np.generic]  # [T, hidden_size], bfloat16 as its bits


class HiddenRows(Protocol):
    """Hidden rows that a head reads, wherever they are: `Rows` themselves, or a handle of rows on a device."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice | list[int], /) -> HiddenRows: ...

    def copy(self) -> HiddenRows:
        """Return the rows without whatever these are a part of."""


@runtime_checkable
class JoinableRows(HiddenRows, Protocol):
    """Hidden rows on a device, which only their own kind can be put behind."""

    def joined(self, others: Sequence[HiddenRows]) -> HiddenRows:
        """Return these rows and those of the others, one behind the other."""


@dataclass
class TokenLists:
    """A list of token ids for every row (CSR), in which row i owns `[starts[i], starts[i + 1])`.

    `starts` is empty if no row has any.
    """

    starts: I32 = field(default_factory=lambda: np.zeros(0, np.int32))
    token_ids: I32 = field(default_factory=lambda: np.zeros(0, np.int32))
    values: F32 = field(default_factory=lambda: np.zeros(0, np.float32))  # one per id for logit_bias, otherwise empty

    @staticmethod
    def of(rows: Sequence[I32], values: Sequence[F32] = ()) -> TokenLists:
        """Build the lists from one array of ids per row, and their values if they have any."""
        if not any(len(row) for row in rows):
            return TokenLists()
        starts = np.zeros(len(rows) + 1, np.int32)
        np.cumsum([len(row) for row in rows], out=starts[1:])
        return TokenLists(starts, np.concatenate(rows), np.concatenate(values) if values else np.zeros(0, np.float32))

    def with_more(self, num_rows: int, more: Mapping[int, I32]) -> TokenLists:
        """Return these lists of `num_rows` rows, which have no values, with more ids in some of the rows."""
        if not any(map(len, more.values())):
            return self
        own = [self.token_ids[each] for each in self._rows(num_rows)]
        return TokenLists.of([np.concatenate((ids, more[row])) if row in more else ids for row, ids in enumerate(own)])

    def with_added(self, num_rows: int, added: Mapping[int, tuple[I32, F32]]) -> TokenLists:
        """Return these lists of `num_rows` rows, which have values, with ids and values added to those of some rows.

        Values of the same id are summed, for a row has an id once.
        """
        if not added:
            return self
        of_rows, values = [], []
        for row, each in enumerate(self._rows(num_rows)):
            ids, own = self.token_ids[each], self.values[each]
            if row in added:
                more, theirs = added[row]
                ids, index = np.unique(np.concatenate((ids, more)), return_inverse=True)
                own = np.bincount(index, np.concatenate((own, theirs)), len(ids)).astype(np.float32)
            of_rows.append(ids)
            values.append(own)
        return TokenLists.of(of_rows, values)

    def _rows(self, num_rows: int) -> list[slice]:
        if not len(self.starts):
            return [slice(0, 0)] * num_rows
        return [slice(*bounds) for bounds in pairwise(self.starts.tolist())]


ROW_DTYPES: dict[str, type[np.generic]] = {
    **dict.fromkeys(("seq_slots", "top_k", "num_logprobs"), np.int32),
    **dict.fromkeys(("temperature", "top_p", "min_p"), np.float32),
    **dict.fromkeys(("typical_p", "xtc_probability", "xtc_threshold"), np.float32),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), np.float32),
    **dict.fromkeys(("seeds", "counters"), np.uint64),
}
"""The dtypes of the fields of `SampleRows` that hold one number per row."""


@dataclass
class SampleRows:
    """The sampling parameters of each of the S logits rows, as a structure of arrays of length S.

    Temperature 0 is greedy. A row's random numbers are Philox at (seed, counter), so that its result does not depend on
    the rest of the batch. num_logprobs 0 asks for none; n asks for the chosen token's and the n most likely ones.
    Penalties read the per-slot counts that `CpuRunner.reset_slot` starts and sampling updates.
    """

    seq_slots: I32
    temperature: F32
    top_k: I32  # 0: off
    top_p: F32  # 1: off
    min_p: F32  # 0: off
    typical_p: F32  # 1: off
    xtc_probability: F32  # 0: off
    xtc_threshold: F32
    repetition_penalty: F32  # 1: off; over prompt and output
    presence_penalty: F32  # 0: off; over output
    frequency_penalty: F32  # 0: off; over output
    seeds: U64
    counters: U64  # index of the token among the sequence's output
    num_logprobs: I32
    logit_bias: TokenLists = field(default_factory=TokenLists)
    banned: TokenLists = field(default_factory=TokenLists)
    allowed: TokenLists = field(default_factory=TokenLists)  # ascending ids; a row without any allows all

    def __len__(self) -> int:
        return len(self.seq_slots)

    def with_counters(self, counters: U64) -> SampleRows:
        """Return these rows with other counters; the other arrays are shared."""
        rows = object.__new__(SampleRows)
        rows.__dict__.update(self.__dict__, counters=counters)
        return rows

    @staticmethod
    def greedy(seq_slots: I32) -> SampleRows:
        """Return rows that take the most likely token (the lower id of equal ones)."""
        n = len(seq_slots)

        def floats(value: float) -> F32:
            return np.full(n, value, np.float32)

        return SampleRows(
            seq_slots=np.asarray(seq_slots, np.int32),
            temperature=floats(0),
            top_k=np.zeros(n, np.int32),
            top_p=floats(1),
            min_p=floats(0),
            typical_p=floats(1),
            xtc_probability=floats(0),
            xtc_threshold=floats(0),
            repetition_penalty=floats(1),
            presence_penalty=floats(0),
            frequency_penalty=floats(0),
            seeds=np.zeros(n, np.uint64),
            counters=np.zeros(n, np.uint64),
            num_logprobs=np.zeros(n, np.int32),
        )


class StepMasks(Protocol):
    """The masks of a step's rows that may choose some tokens only, which are made while the step runs.

    A mask depends on the ids that the step before samples: the runner calls `begin` once these are known, and `wait`
    before it samples. Both may be called by several ranks that run the step together.
    """

    @property
    def mask_rows(self) -> I32:
        """The row of `bits` that is the mask of each logits row [S], or -1 for a row that may choose any token."""

    @property
    def bits(self) -> U32:
        """The masks [rows, ceil(vocab_size / 32)]: bit i % 32 of word i // 32 is 1 if token i may be chosen."""

    def begin(self, last_ids: I32) -> None:
        """Start to make the masks. last_ids: per slot, the id that was last sampled."""

    def wait(self) -> None:
        """Return when the masks are made."""


class RowChange(Protocol):
    """The functions of requests that change some of a step's logits rows before their tokens are chosen."""

    @property
    def errors(self) -> Mapping[int, str]:
        """The errors of rows whose functions failed, by row, once the step has landed."""

    def apply(self, logits: F32, first: int = 0) -> None:
        """Change logits [count, vocab_size] in place, of which the first is row `first` of the step."""


def _no_rows() -> I32:
    return np.zeros(0, np.int32)


def _no_long_rows() -> I64:
    return np.zeros(0, np.int64)


@dataclass(frozen=True)
class Copies:
    """The copies of K and V from slots (or whole blocks) of one KV group to others of it, in every layer."""

    source: I64
    target: I64


def joined(first: tuple[Copies, ...], second: tuple[Copies, ...]) -> tuple[Copies, ...]:
    """Return the copies of every group, the first ones first."""
    if not first or not second:
        return first or second
    return tuple(
        Copies(np.concatenate((one.source, other.source)), np.concatenate((one.target, other.target)))
        for one, other in zip(first, second, strict=True)
    )


@dataclass(frozen=True)
class ScoredQueries:
    """The queries of a step whose attention scores the blocks, and where the scores are added.

    first_rows [B] i32: the first counted row of each sequence of the step, or the row behind its last if none counts.
    scores: per KV group [B, max_blocks] i64, filled in by the compiled step (`StepArgs`); None if nothing is chosen.
    seqs, slots, turns [n] i64: the sequences with counted rows, their slots, and the parity of their stride.
    columns: per KV group [n, max_blocks] i64, the block of its sequence in each column of the step's block table.
    """

    first_rows: I32
    scores: tuple[I64 | None, ...]
    seqs: I64
    slots: I64
    turns: I64
    columns: tuple[I64 | None, ...]


@dataclass(frozen=True)
class StepTree:
    """The trees among a step's drafts, in which several tokens were drafted for one place.

    Beside the chain of a sequence's likeliest drafts there are branches. To the kernels a branch is a sequence of its
    own, behind those of the plan: it has the slot and the first blocks of the sequence that it belongs to, and other
    blocks from that of its first token on. K and V of the tokens before it in that block are copied there by every
    layer, so that a row adds up the same keys in the same order as in a chain.

    num_branches: the last sequences of the plan that are branches.
    parents [S] i32: the row that chooses what a row was drafted for, -1 for the first row of a slot. The rows of a slot
    follow one another, and a parent comes before its children, no two of which are behind the same token.
    echoes: per KV group, the slots that each layer copies once it has written its K and V.
    taken: by slot, the rows of [0, T) that gave it its tokens, once the step has landed.
    """

    num_branches: int
    parents: I32
    echoes: tuple[Copies, ...]
    taken: dict[int, list[int]] = field(default_factory=dict)


@dataclass
class StepPlan:
    """The plan of one step.

    Prefills, chunks and decodes have one form: sequence b owns the rows [query_start_loc[b], query_start_loc[b + 1]).
    """

    token_ids: I32  # [T]
    positions: I64  # [T]
    query_start_loc: I32  # [B + 1]
    seq_lens: I32  # [B] context length, including this step
    seq_slots: I32  # [B]
    logits_rows: I32  # [S] rows of [0, T) that are sampled, several of a sequence whose tokens were drafted
    slot_mapping: tuple[I64, ...]  # per KV group [T]
    block_tables: tuple[I32, ...]  # per KV group [B, max_blocks]
    sample: SampleRows
    # [L] rows of token_ids that are not known here; the runner fills them in.
    pending_rows: I32 = field(default_factory=_no_rows)
    pending_slots: I32 = field(default_factory=_no_rows)  # [L] the slot whose last sampled id is filled in
    # Per KV group, blocks to load from the offload tier to the arena before anything else; () if there are none.
    loads: tuple[Copies, ...] = ()
    # Per KV group, slots to copy before anything is computed; () if there are none.
    copies: tuple[Copies, ...] = ()
    # Whether to return the chosen tokens' log probabilities of all rows, whatever `sample` asks for.
    wants_logprobs: bool = False
    # Ascending rows of [0, T) whose values the taps keep.
    tapped_rows: I64 = field(default_factory=_no_long_rows)
    scored: ScoredQueries | None = None  # the queries whose attention scores blocks
    masks: StepMasks | None = None  # None if every row may choose any token
    processed: RowChange | None = None  # None if no function of a request changes logits
    # [sampled sequences] how many tokens of each were drafted; empty if none of the step. Such a sequence has that many
    # rows more, each behind a drafted token. A row counts only if the row before it (its parent in a tree) counts and
    # chose the token that was drafted.
    num_drafted: I32 = field(default_factory=_no_rows)
    tree: StepTree | None = None  # None if all drafts are chains
    adapter_ids: I32 = field(
        default_factory=_no_rows
    )  # [B] the LoRA adapter of each, 0 for none; empty if none has any

    @property
    def adapters_of_tokens(self) -> I32 | None:
        """The adapter of each token [T], or None if none has one."""
        if not len(self.adapter_ids):
            return None
        return np.repeat(self.adapter_ids, np.diff(self.query_start_loc))

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def tapped_logits(self) -> I64:
        """The ascending indices, in [0, S), of the logits rows that are tapped."""
        is_tapped = np.zeros(self.num_tokens, np.bool_)
        is_tapped[self.tapped_rows] = True
        return np.flatnonzero(is_tapped[self.logits_rows])

    @property
    def num_seqs(self) -> int:
        """The number of sequences, of which the last are branches of trees."""
        return len(self.seq_lens)

    @property
    def num_branches(self) -> int:
        """The number of sequences that are branches of another's drafts."""
        return 0 if self.tree is None else self.tree.num_branches

    def drafts_of(self, first: int, count: int) -> list[list[int]]:
        """Return the tokens drafted on the way to each of a slot's logits rows, `count` from `first` on."""
        ids = self.token_ids[self.logits_rows[first : first + count]].tolist()
        parents = (
            range(-1, count - 1) if self.tree is None else (self.tree.parents[first : first + count] - first).tolist()
        )
        found: list[list[int]] = [[]]
        for row in range(1, count):
            found.append([*found[parents[row]], ids[row]])
        return found


@dataclass(frozen=True)
class Logprobs:
    """The log-softmax of one row's raw logits, at the chosen token and the most likely ones."""

    token_id: int  # the chosen token
    logprob: float
    rank: int  # the rank of the chosen token, from 1
    top: tuple[tuple[int, float], ...]  # (token id, logprob), descending


@dataclass(frozen=True)
class StepResult:
    """The result of one step.

    token_ids [S] i32: the sampled ids in the order of `logits_rows`.
    logprobs: per row, None for rows that did not ask; None if no row did.
    failed [S]: marks rows whose logits, after penalties and masks, held no finite largest value: their ids mean
    nothing. None if there are no such rows.
    chosen_logprobs [S]: only if the plan wants them.
    tapped: values of the plan's tapped rows, or of the logits rows among them, by node.
    kept: the same rows, for a head to read, if they stay on a device.
    """

    token_ids: I32
    logprobs: list[Logprobs | None] | None = None
    failed: NDArray[np.bool_] | None = None
    # The hidden rows that a pipeline stage without the LM head passes on instead of ids.
    hidden: Rows | None = None
    error: str | None = None  # the step failed: nothing else is valid
    chosen_logprobs: F32 | None = None
    tapped: dict[str, NDArray[Any]] | None = None
    kept: HiddenRows | None = None
