"""The sampler of compiled CPU steps, called with rows of logits and parameters."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from cpp_kernels import Kernels
from numpy.typing import NDArray

from inferc.arena import mask_words
from inferc.codegen.cpp.emit import sample_row_bytes
from inferc.manifest import align
from inferc.runtime.runners.cpu import abi
from inferc.runtime.step.plan import F32, SampleRows, TokenLists

VOCAB = 1003
NUM_TOP = 8


def rows_with(**fields: Any) -> SampleRows:
    """Return the parameters of one row, on slot 0."""
    rows = SampleRows.greedy(np.zeros(1, np.int32))
    lists = {
        name: TokenLists.of([np.array(list(value), np.int32)])
        for name, value in fields.items()
        if name in ("logit_bias", "banned", "allowed")
    }
    if "logit_bias" in lists:
        lists["logit_bias"].values = np.array(list(fields["logit_bias"].values()), np.float32)
    arrays = {name: np.array([value], getattr(rows, name).dtype) for name, value in fields.items() if name not in lists}
    changed: dict[str, Any] = {**arrays, **lists}
    return replace(rows, **changed)


def many(rows: SampleRows, count: int) -> SampleRows:
    """Return the same parameters for `count` rows, each on a slot of its own, at counters 0, 1, …"""
    changed: dict[str, Any] = {name: np.repeat(getattr(rows, name), count) for name in abi.SAMPLE_ROW_FIELDS}
    slots, counters = np.arange(count, dtype=np.int32), np.arange(count, dtype=np.uint64)
    for name in ("logit_bias", "banned", "allowed"):
        lists = getattr(rows, name)
        changed[name] = TokenLists.of([lists.token_ids] * count, [lists.values] * count)
    return replace(rows, **{**changed, "seq_slots": slots, "counters": counters})


@dataclass
class Sampled:
    token: NDArray[np.int32]
    failed: NDArray[np.uint8]
    logprob: NDArray[np.float32]
    rank: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top: NDArray[np.float32]

    def row(self, row: int) -> Sampled:
        return Sampled(*(getattr(self, each.name)[row : row + 1] for each in dataclasses.fields(self)))

    def bits(self) -> bytes:
        return b"".join(getattr(self, each.name).tobytes() for each in dataclasses.fields(self))


class Sampler:
    """Samples rows of logits [rows, vocab] or, each from the same, [vocab]; `counts` are slot 0's.

    inputs: the token of each row, which counts where it is not the first of its slot: it was drafted.
    last_ids: by slot, after a call.
    masks: which tokens each row may choose, bool [rows, vocab]; a row of no token has no mask.
    """

    def __init__(
        self,
        kernels: Kernels,
        logits: F32,
        counts: NDArray[np.uint32] | None = None,
        masks: NDArray[np.bool_] | None = None,
        inputs: Sequence[int] = (),
    ) -> None:
        self.inputs, self.last_ids = np.array(inputs, np.int32), np.zeros(0, np.int32)
        self.kernels, self.logits, self.counts = kernels, np.ascontiguousarray(logits, np.float32), counts
        self.masks = masks
        self.vocab = self.logits.shape[-1]

    def rows(self, rows: SampleRows, more: dict[str, NDArray[Any]] | None = None) -> Sampled:
        count = len(rows)
        step = abi.StepArgs(num_rows=count)
        places = np.arange(count, dtype=np.int32)
        if len(self.inputs):
            step.token_ids, step.logits_rows = self.kernels.address(self.inputs), self.kernels.address(places)
        args = abi.SampleArgs(as_step(self.kernels, step), self.vocab)
        keep: list[Any] = []

        def put(name: str, array: NDArray[Any]) -> None:
            keep.append(array)
            setattr(args, name, self.kernels.address(array))

        for name in abi.SAMPLE_ROW_FIELDS:
            put(name, np.ascontiguousarray(getattr(rows, name)))
        for name, lists in (("bias", rows.logit_bias), ("banned", rows.banned), ("allowed", rows.allowed)):
            if len(lists.starts):
                put(f"{name}_starts", lists.starts)
                put(f"{name}_ids", lists.token_ids)
        put("bias_values", rows.logit_bias.values)
        if self.masks is not None:
            put("mask_rows", np.where(self.masks.any(1), np.arange(count), -1).astype(np.int32))
            put("masks", packed(self.masks))
        for name, array in (more or {}).items():
            put(name, array)
        if self.counts is not None:
            put("counts", np.array([self.kernels.address(self.counts), *[0] * count], np.uintp))
        out = Sampled(
            np.full(count, -1, np.int32),
            np.zeros(count, np.uint8),
            np.zeros(count, np.float32),
            np.zeros(count, np.int32),
            np.zeros((count, NUM_TOP), np.int32),
            np.zeros((count, NUM_TOP), np.float32),
        )
        results: dict[str, NDArray[Any]] = {"token_ids": out.token, "failed": out.failed, "logprobs": out.logprob}
        results |= {"ranks": out.rank, "top_ids": out.top_ids, "top_logprobs": out.top}
        for name, array in results.items():
            put(name, array)
        self.last_ids = np.zeros(count + 1, np.int32)
        put("last_ids", self.last_ids)
        args.max_top = NUM_TOP
        logits = np.array(np.broadcast_to(self.logits, (count, self.vocab)), order="C")  # they are overwritten
        scratch, size = scratch_of(self.kernels, self.vocab)
        self.kernels("test_sample", self.kernels.threads, args, logits, scratch, size)
        return out

    def one(self, rows: SampleRows) -> Sampled:
        out = self.rows(rows)
        if out.failed[0]:
            raise ValueError("refused")
        return out

    def __call__(self, rows: SampleRows) -> int:
        return int(self.one(rows).token[0])

    def reach(self, rows: SampleRows, draws: int = 3000) -> NDArray[np.int64]:
        """Return how often each token was drawn, over that many counters."""
        return np.bincount(self.rows(many(rows, draws)).token, minlength=self.vocab)


def packed(masks: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """Return masks [rows, vocab] as bits [rows, words], the first token in the lowest bit."""
    room = np.zeros((len(masks), mask_words(masks.shape[1]) * 32), np.uint8)
    room[:, : masks.shape[1]] = masks
    return np.packbits(room, axis=1, bitorder="little").view(np.uint32)


def as_step(kernels: Kernels, step: abi.StepArgs) -> Any:
    """Return the `step` field of a struct for the next call."""
    return ctypes.cast(kernels.address(step), ctypes.POINTER(abi.StepArgs))


def scratch_of(kernels: Kernels, vocab: int) -> tuple[NDArray[np.uint8], int]:
    """Return scratch memory as large as compiled code has it, full of NaN, and the size of one thread's part."""
    size = align(sample_row_bytes(vocab))
    room = np.full(size * kernels.num_threads + 64, 255, np.uint8)
    return room[-room.ctypes.data % 64 :], size


def some_logits(scale: float = 2.0, size: int = VOCAB) -> F32:
    return (np.random.default_rng(0).standard_normal(size) * scale).astype(np.float32)
