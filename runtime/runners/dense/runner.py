"""The runner over a dense KV cache, for runtimes without block tables.

A call of such a runtime takes equally many tokens of each sequence. A sequence's K and V lie in the cache row of its
slot. A step becomes several calls: one for each sequence with several new tokens, and one for all sequences with a
single new token, over a contiguous range of rows. Rows within the range that take no part in the call get a dummy
token, whose K and V are written just after their own tokens, where their next token will overwrite them.

The rows have room for `capacity` tokens, a power of two where it can be chosen. It grows when a sequence needs more,
and shrinks when a quarter of it is enough. These runtimes attend to the whole row and mask its unused part, so unused
capacity costs time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from inferc.config import ResolvedEngineConfig
from inferc.errors import RequestError
from inferc.runtime.runners.dense.caches import Caches
from inferc.runtime.runners.dense.host_sampler import HostSampler, log_softmax
from inferc.runtime.runners.step_worker import StepWorker
from inferc.runtime.step.limits import outside
from inferc.runtime.step.plan import F32, I32, I64, StepPlan, StepResult

MIN_CAPACITY = 64
Array = NDArray[Any]


class DenseModel(Protocol):
    """The interface of a model that runs the calls and writes the caches in place."""

    @property
    def name(self) -> str: ...

    def __call__(self, inputs: Mapping[str, Array], caches: Mapping[str, Any]) -> tuple[Array, F32]:
        """Run a call and return (hidden [rows, hidden_size], logits float32 [rows, vocab_size]).

        caches: what `Caches.rows` returns.
        """

    def close(self) -> None: ...


@dataclass(frozen=True)
class Call:
    """One call for some of a step's sequences: their cache rows, and their tokens of the step.

    first, count: the range of cache rows; starts [count]: the tokens that each row holds already; tokens [count * new]:
    indices into the step's tokens, or -1 for the dummy token of a row that takes no part.
    """

    first: int
    count: int
    starts: I64
    tokens: I64


class DenseRunner:
    """A runner of a dense program, whose steps run in a thread of their own, in the order of `submit`."""

    def __init__(
        self,
        model: DenseModel,
        caches: Caches,
        config: ResolvedEngineConfig,
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        self._model, self._caches, self._max_model_len = model, caches, max_model_len
        self.vocab_size = vocab_size
        self._free_slots: Sequence[int] = ()
        self._watch: Callable[[F32], None] | None = None  # receives the logits of steps that score
        self._sampler = HostSampler(config.max_num_seqs, vocab_size)
        # Per slot, the number of its sequence's tokens after all submitted steps.
        self._lengths = np.zeros(config.max_num_seqs, np.int64)
        self._capacity = 0  # the capacity of the caches after all submitted steps
        self._num_rows = 0
        # Slots whose rows may hold a NaN. A NaN would reach the slot's next sequence, because masked values are
        # multiplied by 0. They are the slots whose last hidden rows were not finite, or were not requested.
        self._unknown = np.zeros(config.max_num_seqs, np.bool_)
        self._worker = StepWorker()

    @property
    def name(self) -> str:
        """The name of what runs the model, for people."""
        return self._model.name

    def share_free_slots(self, free_slots: Sequence[int]) -> None:
        """Take the scheduler's list of slots that no sequence uses; the rows of all other slots must be kept."""
        self._free_slots = free_slots

    def watch_logits(self, sink: Callable[[F32], None] | None) -> None:
        """Pass `sink` the float32 logits [rows, vocab_size] of every step that scores; None stops it."""
        self._watch = sink

    # ------------------------------------------------------------------------------------------ steps

    def submit(self, plan: StepPlan) -> None:
        calls, resize = self._prepare(plan)
        self._worker.submit(lambda: self._run(plan, calls, resize))

    def wait(self) -> StepResult:
        return self._worker.wait()

    def score(self, plan: StepPlan, target_ids: I32) -> tuple[F32, I32]:
        if len(target_ids) != len(plan.logits_rows) or outside(target_ids, self.vocab_size):
            raise RequestError(
                f"score: {len(target_ids)} target ids for {len(plan.logits_rows)} rows, or one out of range"
            )
        _, logits = self.rows_of(plan)
        if self._watch is not None:
            self._watch(logits)
        rows = np.arange(len(target_ids))
        return log_softmax(logits)[rows, target_ids].astype(np.float32), logits.argmax(1).astype(np.int32)

    def embed(self, plan: StepPlan) -> F32:
        hidden, _ = self.rows_of(plan)
        return hidden.astype(np.float32)

    def rows_of(self, plan: StepPlan) -> tuple[Array, F32]:
        """Run the step and return (hidden, logits) of the plan's logits rows."""
        calls, resize = self._prepare(plan)
        return self._worker.call(lambda: self._rows(plan, calls, resize))  # type: ignore[no-any-return]

    def reset_slot(self, slot: int, prompt_ids: I32 | None, output_ids: I32 | None = None) -> None:
        self._lengths[slot] = 0
        self._worker.put(lambda: self._sampler.reset_slot(slot, prompt_ids, output_ids))

    def close(self) -> None:
        if self._worker.close():
            try:
                self._caches.close()
            finally:
                self._model.close()

    # ------------------------------------------------------------------------------------- where things lie

    def _prepare(self, plan: StepPlan) -> tuple[list[Call], tuple[int, int] | None]:
        """Return the step's calls, and the (rows, capacity) that the caches must be resized to first, or None."""
        self._lengths[list(self._free_slots)] = 0
        self._lengths[plan.seq_slots] = plan.seq_lens
        calls = calls_of(plan, self._lengths, self._max_model_len)
        rows, capacity = self._num_rows, self._capacity
        rows = max(rows, int(plan.seq_slots.max()) + 1)
        # One more, for the dummy token of a row that takes no part in a call. A sequence at its maximum length has no
        # room for one; its last token may be overwritten, since it is not read again.
        needed = min(int(self._lengths.max()) + 1, self._max_model_len)
        if (fixed := self._caches.fixed_capacity) is not None:
            capacity = fixed
        elif not capacity or needed > capacity or needed * 4 <= capacity:
            capacity = min(max(MIN_CAPACITY, 1 << (needed - 1).bit_length()), self._max_model_len)
        if (rows, capacity) == (self._num_rows, self._capacity):
            return calls, None
        self._num_rows, self._capacity = rows, capacity
        return calls, (rows, capacity)

    # ------------------------------------------------------------------------------------------ the worker

    def _run(self, plan: StepPlan, calls: list[Call], resize: tuple[int, int] | None) -> StepResult:
        _, logits = self._rows(plan, calls, resize)
        return self._sampler.sample(plan, logits)

    def _clear_rows(self, plan: StepPlan) -> None:
        """Clear the rows of sequences that begin, if they may hold a NaN."""
        begin = plan.seq_slots[plan.seq_lens == np.diff(plan.query_start_loc)]
        for slot in begin[self._unknown[begin]].tolist():
            self._caches.clear(slot)
            self._unknown[slot] = False

    def _note_rows(self, plan: StepPlan, hidden: Array) -> None:
        """Note which slots may hold a NaN: a finite hidden row shows that its sequence has none."""
        slots = plan.seq_slots[np.searchsorted(plan.query_start_loc, plan.logits_rows, side="right") - 1]
        is_finite = np.isfinite(hidden).all(1)
        self._unknown[plan.seq_slots] = True
        self._unknown[slots[is_finite]] = False
        self._unknown[slots[~is_finite]] = True  # a scored sequence may have finite and other rows

    def _rows(self, plan: StepPlan, calls: list[Call], resize: tuple[int, int] | None) -> tuple[Array, F32]:
        if resize is not None:
            self._caches.resize(*resize)
        self._clear_rows(plan)
        token_ids = self._sampler.token_ids(plan)
        found: list[tuple[I64, Array, F32]] = []
        for call in calls:
            inputs, rows = call_inputs(plan, call, token_ids)
            hidden, logits = self._model(inputs, self._caches.rows(call.first, call.count))
            found.append((rows, hidden, logits))
        if len(found) == 1:  # it is in the step's order already
            _, hidden_rows, logits_rows = found[0]
        else:
            order = np.argsort(np.concatenate([rows for rows, _, _ in found]), kind="stable")
            hidden_rows = np.concatenate([hidden for _, hidden, _ in found])[order]
            logits_rows = np.concatenate([logits for _, _, logits in found])[order]
        self._note_rows(plan, hidden_rows)
        return hidden_rows, logits_rows


def calls_of(plan: StepPlan, lengths: I64, max_model_len: int) -> list[Call]:
    """Return the calls of a step. lengths [num_slots]: the tokens of each slot's sequence after the step."""
    new = np.diff(plan.query_start_loc)
    calls = []
    for seq in np.flatnonzero(new > 1).tolist():
        start, end = int(plan.query_start_loc[seq]), int(plan.query_start_loc[seq + 1])
        starts = np.array([int(plan.seq_lens[seq]) - (end - start)])
        calls.append(Call(int(plan.seq_slots[seq]), 1, starts, np.arange(start, end)))
    ones = np.flatnonzero(new == 1)
    ones = ones[np.argsort(plan.seq_slots[ones], kind="stable")]
    for seqs in _runs(ones, plan.seq_slots[ones].astype(np.int64)):
        slots = plan.seq_slots[seqs].astype(np.int64)
        first, count = int(slots[0]), int(slots[-1] - slots[0]) + 1
        starts = np.minimum(lengths[first : first + count], max_model_len - 1)
        tokens = np.full(count, -1, np.int64)
        starts[slots - first] = plan.seq_lens[seqs] - 1
        tokens[slots - first] = plan.query_start_loc[seqs]
        calls.append(Call(first, count, starts, tokens))
    return calls


def _runs(seqs: I64, slots: I64) -> list[I64]:
    """Split sequences in rising order of slots into runs, wherever more rows would idle in between than take part."""
    runs: list[list[int]] = []
    first = 0  # the first slot of the current run
    for seq, slot in zip(seqs.tolist(), slots.tolist(), strict=True):
        if runs and slot - first + 1 <= 2 * (len(runs[-1]) + 1):
            runs[-1].append(seq)
        else:
            runs.append([seq])
            first = slot
    return [np.array(run) for run in runs]


def call_inputs(plan: StepPlan, call: Call, token_ids: I32) -> tuple[dict[str, Array], I64]:
    """Return a call's inputs by name, and the positions of its logits rows among the step's."""
    num_new = len(call.tokens) // call.count
    is_own = call.tokens >= 0
    place = np.full(plan.num_tokens, -1, np.int64)
    place[call.tokens[is_own]] = np.flatnonzero(is_own)
    rows = np.flatnonzero(place[plan.logits_rows] >= 0)
    inputs: dict[str, Array] = {
        "token_ids": np.where(is_own, token_ids[call.tokens], 0).astype(np.int32),
        "positions": (call.starts[:, None] + np.arange(num_new)).ravel(),
        "starts": call.starts,
        "seq_lens": call.starts + num_new,
        "logits_rows": place[plan.logits_rows[rows]].astype(np.int32),
    }
    return inputs, rows
