"""Samples a step by the kernels for a GPU, and says where the result is not the oracle's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferc.arena import mask_words
from inferc.codegen.triton.aot.source import Source
from inferc.codegen.triton.kernels.sampling.choose import choose, list_stride
from inferc.codegen.triton.kernels.sampling.keep_chosen import keep_chosen
from inferc.codegen.triton.kernels.sampling.process_logits import apply_lists, penalize
from inferc.codegen.triton.kernels.sampling.report_logprobs import report_logprobs
from inferc.codegen.triton.kernels.sampling.row_parts import row_parts
from inferc.runtime.runners.dense.host_sampler import _logprobs, _processed, sample_row
from inferc.runtime.step.plan import F32, I32, SampleRows

Launch = Callable[[Source, dict[str, int], dict[str, Tensor]], None]  # of a kernel, over counts, by names of arguments
SPARE = 2  # rows that a launch's grid has room for and the chunk has not
UNTOUCHED = -77  # what outputs hold before
MOST = 64  # tokens with a log-probability in a row
NEAR = 2e-6  # of log-probabilities, relative to 1 + |theirs|
IN_PROMPT = np.uint32(1 << 31)


@dataclass(frozen=True)
class Sizes:
    """The sizes of what kernels cut their work into: so small that a little vocabulary is many of each."""

    part: int = 4096
    tile: int = 1024
    block: int = 2048
    ids: int = 512


@dataclass
class SampledStep:
    """A step with sampled rows.

    logits [S, vocab]; in_prompt and num_output [slots, vocab] of the slots that count; chunk: rows sampled at once.
    masks [S, vocab]: which tokens each row may choose; a row of no token has no mask. inputs [S]: the token that each
    row is behind, which was drafted if the row before is of the same slot.
    """

    name: str
    logits: F32
    rows: SampleRows
    sizes: Sizes = field(default_factory=Sizes)
    in_prompt: dict[int, NDArray[np.bool_]] = field(default_factory=dict)
    num_output: dict[int, I32] = field(default_factory=dict)
    chunk: int = 16
    masks: NDArray[np.bool_] | None = None
    inputs: I32 = field(default_factory=lambda: np.zeros(0, np.int32))

    def __post_init__(self) -> None:
        if not len(self.inputs):
            self.inputs = np.random.default_rng(len(self.rows)).integers(0, self.vocab, len(self.rows)).astype(np.int32)

    @property
    def vocab(self) -> int:
        return int(self.logits.shape[1])

    def processed(self, row: int) -> F32:
        """Return the logits from which the choice is made. NaN counts as -inf does."""
        return _processed(self.rows, row, self.masked(row), *self.seen(row))

    def masked(self, row: int) -> F32:
        """Return the logits with -inf for the tokens that the row's mask does not have."""
        logits = self.logits_without_nan(row)
        mask = None if self.masks is None else self.masks[row]
        return logits if mask is None or not mask.any() else np.where(mask, logits, np.float32(-np.inf))

    def logits_without_nan(self, row: int) -> F32:
        logits = self.logits[row]
        return np.where(np.isnan(logits), np.float32(-np.inf), logits)

    def is_behind_draft(self, row: int) -> bool:
        slots = self.rows.seq_slots
        return row > 0 and bool(slots[row - 1] == slots[row])

    def seen(self, row: int) -> tuple[NDArray[np.bool_], I32]:
        """Return the tokens that are in the prompt of a row's slot, and how often each was output or drafted before."""
        none, slot = np.zeros(self.vocab, np.int32), int(self.rows.seq_slots[row])
        if slot not in self.num_output:
            return none.astype(np.bool_), none
        num_output = self.num_output[slot].copy()
        for at in range(row, 0, -1):
            if not self.is_behind_draft(at):
                break
            num_output[self.inputs[at]] += 1
        return self.in_prompt[slot], num_output

    def expected(self, row: int) -> int:
        """The id, -1 if no finite number is the largest."""
        rows, seen = self.rows, self.seen(row)
        if not np.isfinite(self.processed(row).max()):
            return -1
        if rows.min_p[row] > 1:  # the most likely token, to which the oracle has no answer
            rows = replace(rows, temperature=np.zeros_like(rows.temperature))
        with np.errstate(over="ignore", invalid="ignore"):
            return sample_row(rows, row, self.masked(row), *seen)[0]

    def sources(self) -> dict[str, Source]:
        vocab, sizes = self.vocab, self.sizes
        strides = self.strides
        return {
            "penalize": penalize(vocab, *strides, block=sizes.block),
            "apply_lists": apply_lists(vocab, *strides, ids=sizes.ids),
            "row_parts": row_parts(vocab, *strides, part=sizes.part),
            "choose": choose(vocab, *strides, part=sizes.part, tile=sizes.tile),
            "report_logprobs": report_logprobs(vocab, strides[0], block=sizes.block, tile=sizes.tile),
        }

    @property
    def strides(self) -> tuple[int, int]:
        """Return the strides of the logits, and of what they are processed to."""
        return self.vocab + 3, -(-self.vocab // 4) * 4


def run_step(step: SampledStep, launch: Launch, device: str = "cpu") -> dict[str, NDArray[Any]]:
    """Samples a step, chunk by chunk: token_ids, last_ids, x, counts by slot, and logprobs, ranks, top_ids,
    top_logprobs; x: the numbers chosen from, NaN in rows whose logits are."""
    count, slots = len(step.rows), int(step.rows.seq_slots.max()) + 3
    tensors, keep = _parameters(step, slots, device)
    outputs: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    outputs = {"token_ids": (torch.int32, ()), "logprobs": (torch.float32, ()), "ranks": (torch.int32, ())}
    outputs |= {"top_ids": (torch.int32, (MOST,)), "top_logprobs": (torch.float32, (MOST,))}
    for name, (dtype, shape) in outputs.items():
        tensors[f"{name}_ptr"] = torch.full((count + SPARE, *shape), UNTOUCHED, dtype=dtype, device=device)
    tensors["last_ids_ptr"] = torch.full((slots,), UNTOUCHED, dtype=torch.int32, device=device)
    sources = step.sources()
    parts = int(sources["row_parts"].constants["PARTS"])
    stride, x_stride = step.strides
    processed = []
    for first in range(0, count, step.chunk):
        rows = min(step.chunk, count - first)
        room = step.chunk + SPARE
        logits = torch.full((room, stride), float("nan"))
        logits[:rows, : step.vocab] = torch.from_numpy(step.logits[first : first + rows])
        tensors["logits_ptr"] = logits.to(device)
        scratch = {"x": x_stride, "tops": parts * 64, "mass": parts, "list_values": list_stride(step.vocab)}
        for name, size in scratch.items():  # of what was there before, nothing counts
            tensors[f"{name}_ptr"] = torch.full((room, size), float("nan"), device=device)
        for name, size in {"first": parts, "list_ids": list_stride(step.vocab)}.items():
            tensors[f"{name}_ptr"] = torch.full((room, size), 1 << 30, dtype=torch.int32, device=device)
        tensors["counts_ptr"] = torch.tensor([0, rows, 0, first, count], dtype=torch.int32, device=device)
        for source in sources.values():
            launch(source, {"num_rows": rows + SPARE}, {name: tensors[name] for name in source.signature})
        processed.append(tensors["x_ptr"][:rows, : step.vocab].cpu())
    tensors["counts_ptr"] = torch.tensor([0, count, 0, 0, count], dtype=torch.int32, device=device)
    keep_source = keep_chosen()
    launch(keep_source, {"num_rows": count + SPARE}, {name: tensors[name] for name in keep_source.signature})
    found = {name: tensors[f"{name}_ptr"].cpu().numpy() for name in ("last_ids", *outputs)}
    found["x"] = torch.cat(processed).numpy()
    return {**found, **{f"counts {slot}": table.cpu().numpy().view(np.uint32) for slot, table in keep.items()}}


def _parameters(step: SampledStep, slots: int, device: str) -> tuple[dict[str, Tensor], dict[int, Tensor]]:
    """Return what kernels read of a step by the names of their arguments, and the counts of slots."""
    rows = step.rows
    names = {"seq_slots": "slots", "repetition_penalty": "repetition"}
    names |= {"presence_penalty": "presence", "frequency_penalty": "frequency"}
    tensors = {}
    narrowing = ("typical_p", "xtc_probability", "xtc_threshold")
    for name in ("temperature", "top_k", "top_p", "min_p", *narrowing, "num_logprobs", "seeds", "counters", *names):
        array = getattr(rows, name)
        array = array.view(np.int64) if array.dtype == np.uint64 else array
        tensors[f"{names.get(name, name)}_ptr"] = torch.tensor(array, device=device)
    tensors |= {name: torch.tensor(array, device=device) for name, array in _masks(step).items()}
    # The rows are behind every other token of the step, from its end on.
    logits_rows = np.arange(len(rows), dtype=np.int32)[::-1] * 2 + 1
    inputs = np.full(2 * len(rows) + 1, UNTOUCHED, np.int32)
    inputs[logits_rows] = step.inputs
    tensors["inputs_ptr"] = torch.tensor(inputs, device=device)
    tensors["logits_rows_ptr"] = torch.tensor(logits_rows.copy(), device=device)
    addresses = []
    for name, lists in (("bias", rows.logit_bias), ("banned", rows.banned), ("allowed", rows.allowed)):
        starts = lists.starts if len(lists.starts) else np.zeros(len(rows) + 1, np.int32)
        tensors[f"{name}_starts_ptr"] = torch.tensor(starts, device=device)
        tensors[f"{name} ids"] = torch.tensor(lists.token_ids, device=device)
        addresses.append(tensors[f"{name} ids"].data_ptr())
        if name == "bias":
            tensors["bias values"] = torch.tensor(lists.values, device=device)
            addresses.append(tensors["bias values"].data_ptr())
    tensors["lists_ptr"] = torch.tensor(addresses, device=device)
    keep = {}
    table = torch.zeros(slots, dtype=torch.int64)
    for slot, in_prompt in step.in_prompt.items():
        counts = step.num_output[slot].astype(np.uint32) | np.where(in_prompt, IN_PROMPT, np.uint32(0))
        keep[slot] = torch.tensor(counts.view(np.int32), device=device)
        table[slot] = keep[slot].data_ptr()
    tensors["count_table_ptr"] = table.to(device)
    return tensors, keep


def _masks(step: SampledStep) -> dict[str, NDArray[np.int32]]:
    """Return the masks as bits, without gaps, and which of them is each row's."""
    masks = np.zeros((len(step.rows), step.vocab), np.bool_) if step.masks is None else step.masks
    has_mask = masks.any(1)
    room = np.zeros((has_mask.sum() + 1, mask_words(step.vocab) * 32), np.uint8)
    room[:-1, : step.vocab] = masks[has_mask]
    mask_rows = np.where(has_mask, np.cumsum(has_mask) - 1, -1).astype(np.int32)
    return {"mask_rows_ptr": mask_rows, "masks_ptr": np.packbits(room, axis=1, bitorder="little").view(np.int32)}


def faults(step: SampledStep, found: dict[str, NDArray[Any]]) -> list[str]:
    """Return the differences of a sampled step from what the oracle makes of it."""
    wrong: list[str] = []

    def check(what: str, value: Any, expected: Any) -> None:
        if not np.array_equal(np.asarray(value), np.asarray(expected)):
            wrong.append(f"{what}: {np.asarray(value).tolist()} instead of {np.asarray(expected).tolist()}")

    def near(what: str, value: Any, expected: Any) -> None:
        if not np.allclose(value, expected, rtol=NEAR, atol=NEAR):
            wrong.append(f"{what}: {np.asarray(value).tolist()} instead of {np.asarray(expected).tolist()}")

    last = np.full(len(found["last_ids"]), UNTOUCHED, np.int32)
    outputs = {slot: counts.copy() for slot, counts in step.num_output.items()}
    counts_too, before = False, -1  # whether the row counts, and what the row before it chose
    for row in range(len(step.rows)):
        token, slot = step.expected(row), int(step.rows.seq_slots[row])
        check(f"row {row} token", found["token_ids"][row], token)
        if not np.isnan(found["x"][row]).all():
            near(f"row {row} processed", found["x"][row], step.processed(row))
        elif not np.array_equal(step.processed(row), step.logits_without_nan(row)):
            wrong.append(f"row {row} is not processed")
        counts_too = not step.is_behind_draft(row) or (counts_too and before == step.inputs[row])
        before = token
        if counts_too:
            last[slot] = max(token, 0)
        if counts_too and token >= 0 and slot in outputs:
            outputs[slot][token] += 1
        count = int(step.rows.num_logprobs[row]) if token >= 0 else 0
        chosen = int(found["token_ids"][row])
        told = _logprobs(step.logits[row], chosen, min(count, step.vocab)) if chosen >= 0 else None
        if told is None:
            check(f"row {row} rank", found["ranks"][row], UNTOUCHED)
            check(f"row {row} logprob", found["logprobs"][row], UNTOUCHED)
        else:
            check(f"row {row} rank", found["ranks"][row], told.rank)
            near(f"row {row} logprob", found["logprobs"][row], told.logprob)
            check(f"row {row} top ids", found["top_ids"][row, : len(told.top)], [each for each, _ in told.top])
            near(f"row {row} top", found["top_logprobs"][row, : len(told.top)], [value for _, value in told.top])
        behind = len(told.top) if told else 0
        check(f"row {row} top ids behind", np.unique(found["top_ids"][row, behind:]), [UNTOUCHED][: MOST - behind])
    check("last ids", found["last_ids"], last)
    for name in ("token_ids", "ranks", "logprobs"):
        check(f"{name} behind", found[name][len(step.rows) :], [UNTOUCHED] * SPARE)
    for slot, counts in outputs.items():
        prompt = np.where(step.in_prompt[slot], IN_PROMPT, np.uint32(0))
        check(f"counts of slot {slot}", found[f"counts {slot}"], counts.astype(np.uint32) | prompt)
    return wrong
