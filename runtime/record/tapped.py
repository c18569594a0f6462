"""The collection of tapped values by sequence: the values of all its tokens, from the first of the prompt on."""

from __future__ import annotations

import logging
import queue
import re
import threading
import zipfile
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferc.errors import ConfigError, RequestError
from inferc.runtime.artifact.numpy_dtypes import NUMPY_DTYPES, widened
from inferc.runtime.record.watcher import Watcher
from inferc.runtime.runners.nodes import Node
from inferc.runtime.step.plan import I64, StepPlan, StepResult
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.step.sequence import Sequence as Seq
from inferc.system.atomic_file import atomic_write
from inferc.system.private_files import private_folder
from inferc.system.resources import available_memory_bytes

log = logging.getLogger(__name__)

MEMORY_SHARE = 0.5  # the share of free memory that the values of one request may take
CLOSE_SECONDS = 60.0  # how long closing waits for the remaining writes

Values = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class TappedSequence:
    """The tapped values of one sequence: row i belongs to the token at position i.

    The last token was sampled but never fed back, so it has no row. sampled: the rows after which a token was sampled,
    which are the rows of nodes by logits row. bfloat16 values are given as float32.
    """

    request: str
    index: int
    token_ids: NDArray[np.int32]
    sampled: I64
    values: Values


@dataclass
class _Pieces:
    """The values of a sequence, step by step; tokens recomputed after a preemption appear again, with the same bits."""

    positions: list[I64] = field(default_factory=list)
    sampled: list[I64] = field(default_factory=list)
    values: list[Values] = field(default_factory=list)


@dataclass
class _Open:
    name: str
    left: int
    pieces: dict[int, _Pieces]
    ended: list[TappedSequence] = field(default_factory=list)


@dataclass(frozen=True)
class _Part:
    """The rows of one sequence in a step: `[start, end)` of the tapped rows."""

    seq: Seq
    start: int
    end: int


class TapCollector(Watcher):
    """The collector of tapped values, which marks the rows of tapped requests in each plan.

    It splits the values of each step by sequence. folder: where a file per request is written, in a thread of its own;
    None: `ended` holds the results. Raises ConfigError if the folder cannot be made.
    """

    def __init__(self, nodes: Sequence[Node], folder: Path | None = None) -> None:
        self._nodes = nodes
        self._by_logits_row = {node.name: node.by_logits_row for node in nodes}
        self._open: dict[str, _Open] = {}
        self._marks: deque[list[_Part]] = deque()  # the marked parts of each plan in flight that has any
        self.ended: queue.SimpleQueue[list[TappedSequence] | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        if folder is not None:
            _make(folder)
            self._writer = threading.Thread(target=self._write, args=(folder,), name="inferc-taps", daemon=True)
            self._writer.start()

    def check(self, prompt_len: int, max_total: int, params: SamplingParams) -> None:
        if not params.tap:
            return
        new = max_total - prompt_len
        rows = {False: max_total, True: new}
        needed = params.n * sum(rows[node.by_logits_row] * node.row_bytes for node in self._nodes)
        free = available_memory_bytes()
        if needed > MEMORY_SHARE * free:
            raise RequestError(
                f"tap: the values of {max_total} tokens and {params.n} outputs may take {needed / 1e9:.1f} GB, and"
                f" {free / 1e9:.1f} GB are free; lower max_tokens or n, or tap fewer nodes"
            )

    def begin(self, name: str, seed: int, seqs: Sequence[Seq]) -> None:
        if not seqs[0].params.tap:
            return
        request_id = seqs[0].request_id
        self._open[request_id] = _Open(name or request_id, len(seqs), {seq.index: _Pieces() for seq in seqs})

    def submitted(self, plan: StepPlan, seqs: Sequence[Seq | None]) -> None:
        if not self._open:
            return
        rows: list[I64] = []
        parts: list[_Part] = []
        count = 0
        for at, slot in enumerate(plan.seq_slots.tolist()):
            seq = seqs[slot]
            if seq is not None and seq.params.tap:
                own = np.arange(plan.query_start_loc[at], plan.query_start_loc[at + 1], dtype=np.int64)
                parts.append(_Part(seq, count, count + len(own)))
                rows.append(own)
                count += len(own)
        if parts:
            plan.tapped_rows = np.concatenate(rows)
            self._marks.append(parts)

    def landed(self, plan: StepPlan, result: StepResult) -> None:
        if not len(plan.tapped_rows):
            return
        values = result.tapped
        assert values is not None, "the runner was asked for values"
        logits_rows = plan.logits_rows[plan.tapped_logits]
        for part in self._marks.popleft():
            pieces = self._pieces(part.seq)
            if pieces is None:  # the sequence ended while this step was in flight
                continue
            own = plan.tapped_rows[part.start : part.end]
            is_own = (logits_rows >= own[0]) & (logits_rows <= own[-1])
            pieces.positions.append(plan.positions[own])
            pieces.sampled.append(plan.positions[logits_rows[is_own]])
            pieces.values.append(
                {
                    name: array[is_own] if self._by_logits_row[name] else array[part.start : part.end]
                    for name, array in values.items()
                }
            )

    def _pieces(self, seq: Seq) -> _Pieces | None:
        entry = self._open.get(seq.request_id)
        return None if entry is None else entry.pieces.get(seq.index)

    def end(self, seq: Seq, reason: str) -> None:
        if not seq.params.tap:
            return
        entry = self._open[seq.request_id]
        entry.ended.append(self._join(entry.name, seq, entry.pieces.pop(seq.index)))
        entry.left -= 1
        if not entry.left:
            del self._open[seq.request_id]
            self.ended.put(sorted(entry.ended, key=lambda each: each.index))

    def _join(self, name: str, seq: Seq, pieces: _Pieces) -> TappedSequence:
        positions, rows = _first_of_each(pieces.positions)
        sampled, logits_rows = _first_of_each(pieces.sampled)
        assert positions.tolist() == list(range(len(positions))), "a row is missing"
        values = {}
        for node in self._nodes:
            parts = [each.pop(node.name) for each in pieces.values]
            empty: NDArray[Any] = np.zeros((0, *node.shape), NUMPY_DTYPES[node.dtype])
            whole = np.concatenate([empty, *parts])[logits_rows if node.by_logits_row else rows]
            values[node.name] = widened(whole) if node.dtype == "bfloat16" else whole
        token_ids = np.array(seq.token_ids[: len(positions)], np.int32)
        return TappedSequence(name, seq.index, token_ids, sampled, values)

    def close(self) -> None:
        if self._writer is not None:
            self.ended.put(None)
            self._writer.join(CLOSE_SECONDS)

    def _write(self, folder: Path) -> None:
        while (sequences := self.ended.get()) is not None:
            path = folder / f"{file_name(sequences[0].request)}.npz"
            try:
                write_tapped(path, sequences)
            except ConfigError as error:
                log.warning("the tapped values of request %s are lost: %s", sequences[0].request, error)


def _first_of_each(parts: Sequence[I64]) -> tuple[I64, I64]:
    """Return the distinct positions in rising order, and the index at which each occurs first."""
    whole = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    positions, first = np.unique(whole, return_index=True)
    return positions, first.astype(np.int64)


def _make(folder: Path) -> None:
    try:
        private_folder(folder, is_ours=False)
    except OSError as error:
        raise ConfigError(f"--tap-out {folder}: cannot make the folder: {error.strerror}") from None


def file_name(request: str) -> str:
    """Return a request's name without the characters that a file name may not have."""
    return re.sub(r"^\.|[^\w.-]", "_", request) or "_"


def write_tapped(path: Path, sequences: Sequence[TappedSequence]) -> None:
    """Write sequences as one .npz file, completely or not at all. Raises ConfigError.

    The rows of all sequences are concatenated. `request`, `index`, `position` and `token_id` have an entry per row;
    `sampled` lists the rows after which a token was sampled. A node has as many rows as `position`, or as `sampled` if
    it is computed only for those.
    """
    with atomic_write(path, private=True) as partial, zipfile.ZipFile(partial, "w", allowZip64=True) as file:
        for name, array in _columns(sequences):
            with file.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)  # type: ignore[no-untyped-call]


def _columns(sequences: Sequence[TappedSequence]) -> Iterable[tuple[str, NDArray[Any]]]:
    counts = [len(each.token_ids) for each in sequences]
    starts = np.cumsum([0, *counts])
    yield "request", np.repeat(np.array([each.request for each in sequences]), counts)
    yield "index", np.repeat(np.array([each.index for each in sequences], np.int32), counts)
    yield "position", np.concatenate([np.arange(count) for count in counts])
    yield "token_id", np.concatenate([each.token_ids for each in sequences])
    yield "sampled", np.concatenate([start + each.sampled for start, each in zip(starts, sequences, strict=False)])
    for name in sequences[0].values:
        yield name, np.concatenate([each.values[name] for each in sequences])
