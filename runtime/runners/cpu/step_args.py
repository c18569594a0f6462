"""The conversion of a step plan into the C structs of abi.py, and of the sampler's output into a step result.

Everything is prepared before the step runs; the memory that a struct points to is kept alive as long as the struct.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferc.runtime.runners.cpu import abi
from inferc.runtime.step.plan import (
    I32,
    ROW_DTYPES,
    Copies,
    Logprobs,
    Rows,
    SampleRows,
    StepMasks,
    StepPlan,
    StepResult,
    StepTree,
    TokenLists,
)


@dataclass
class StepInputs:
    """The struct of a step and its token ids, which `fill_pending` completes once the previous step has sampled."""

    args: abi.StepArgs
    _token_ids: I32
    _pending_rows: I32
    _pending_slots: I32
    _keep: list[Any]
    hidden_out: Rows | None = None  # the rows that the step writes for the next stage

    def take_hidden(self, rows: Rows) -> None:
        """Set the hidden rows that the previous pipeline stage computed as this step's input."""
        rows = np.ascontiguousarray(rows)
        self._keep.append(rows)
        self.args.hidden_in = rows.ctypes.data

    def give_hidden(self, rows: Rows) -> None:
        """Set the array into which the step writes the hidden rows for the next pipeline stage."""
        self.hidden_out = rows
        self.args.hidden_out = rows.ctypes.data

    @staticmethod
    def of(
        plan: StepPlan,
        maxima: Sequence[int],
        pools: NDArray[np.uintp],
        weights: NDArray[np.uintp],
        threads: int,
        adapters: int = 0,
    ) -> StepInputs:
        """Build the inputs of a step from its plan.

        maxima: the tokens, sequences and rows that the arena was sized for; pools, weights: their addresses; threads:
        the address of the thread pool; adapters: that of the table of LoRA adapters.
        """
        token_ids = np.array(plan.token_ids, np.int32)
        slots = [abi.contiguous(slots, np.int64) for slots in plan.slot_mapping]
        tables = [abi.contiguous(table, np.int32) for table in plan.block_tables]
        arrays: dict[str, NDArray[Any]] = {
            "token_ids": token_ids,
            "positions": abi.contiguous(plan.positions, np.int64),
            **{
                name: abi.contiguous(getattr(plan, name), np.int32)
                for name in ("query_start_loc", "seq_lens", "seq_slots", "logits_rows")
            },
            "slot_mapping": np.array([array.ctypes.data for array in slots], np.uintp),
            "block_table": np.array([array.ctypes.data for array in tables], np.uintp),
            "max_blocks": np.array([table.shape[1] for table in tables], np.int64),
            "kv_cache": pools,
            "weights": weights,
        }
        args = abi.StepArgs(abi.ABI, plan.num_tokens, plan.num_seqs, len(plan.logits_rows), *maxima)
        for name, array in arrays.items():
            setattr(args, name, array.ctypes.data)
        args.threads = threads
        kept: list[Any] = [arrays, slots, tables]
        if (scored := plan.scored) is not None:
            addresses = np.array([0 if each is None else each.ctypes.data for each in scored.scores], np.uintp)
            args.mass_from, args.masses = scored.first_rows.ctypes.data, addresses.ctypes.data
            kept += [scored, addresses]
        if (ids := plan.adapters_of_tokens) is not None:
            args.adapter_ids, args.adapters = ids.ctypes.data, adapters
            kept.append(ids)
        if plan.tree is not None:
            kept.append(_set_echoes(args, plan.tree.echoes))
        return StepInputs(args, token_ids, plan.pending_rows, plan.pending_slots, kept)

    def fill_pending(self, last_ids: I32) -> None:
        """Fill in the ids that were last sampled for the slots of the pending rows."""
        if len(self._pending_rows):
            self._token_ids[self._pending_rows] = last_ids[self._pending_slots]


@dataclass
class SampleInputs:
    """The struct of the sampler and its result arrays by field name."""

    args: abi.SampleArgs
    _out: dict[str, NDArray[Any]]
    _num_logprobs: list[int]
    _keep: list[Any]
    _wants_logprobs: bool

    @staticmethod
    def of(
        rows: SampleRows,
        step: StepInputs,
        vocab_size: int,
        counts: NDArray[np.uintp],
        last_ids: I32,
        wants_logprobs: bool = False,
        masks: StepMasks | None = None,
        tree: StepTree | None = None,
    ) -> SampleInputs:
        """Build the inputs of the sampler for the rows of a step.

        counts: per slot the address of its penalty counts, or 0; last_ids: the last id per slot, written by the
        sampler; wants_logprobs: return the log probability of every row's chosen token, even where `rows` ask for none;
        masks: of the rows that may choose some tokens only; tree: whose the rows are, unless each is behind the one
        before it.
        """
        count, top = len(rows), int(rows.num_logprobs.max(initial=0))
        out: dict[str, NDArray[Any]] = {
            "failed": np.zeros(count, np.uint8),
            "token_ids": np.zeros(count, np.int32),
            "logprobs": np.zeros(count, np.float32),
            "ranks": np.zeros(count, np.int32),
            "top_ids": np.zeros((count, top), np.int32),
            "top_logprobs": np.zeros((count, top), np.float32),
        }
        kept = {name: abi.contiguous(getattr(rows, name), kind) for name, kind in ROW_DTYPES.items()}
        if wants_logprobs:
            kept["num_logprobs"] = np.maximum(kept["num_logprobs"], 1)
        lists = {**_list_args("bias", rows.logit_bias), **_list_args("banned", rows.banned)}
        lists.update(_list_args("allowed", rows.allowed))
        if masks is not None:
            lists.update(mask_rows=abi.contiguous(masks.mask_rows, np.int32), masks=masks.bits)
        if tree is not None:
            lists["parents"] = abi.contiguous(tree.parents, np.int32)
        args = abi.SampleArgs(ctypes.pointer(step.args), vocab_size)
        for name, array in {**kept, **lists, **out}.items():
            setattr(args, name, abi.pointer(array))
        args.counts, args.last_ids, args.max_top = counts.ctypes.data, last_ids.ctypes.data, top
        keep = [kept, lists, step, counts, last_ids]
        return SampleInputs(args, out, rows.num_logprobs.tolist(), keep, wants_logprobs)

    def result(self) -> StepResult:
        """Convert what the sampler wrote into a step result."""
        out = self._out
        failed = out["failed"].astype(np.bool_) if out["failed"].any() else None
        logprobs = None
        if self.args.max_top:
            logprobs = [_logprobs(out, row, count) for row, count in enumerate(self._num_logprobs)]
        chosen = out["logprobs"] if self._wants_logprobs else None
        return StepResult(out["token_ids"], logprobs, failed, chosen_logprobs=chosen)


def _set_echoes(args: abi.StepArgs, echoes: Sequence[Copies]) -> list[Any]:
    """Set what each layer copies once it has written its K and V, and return the arrays that are to be kept."""
    counts = np.array([len(each.source) for each in echoes], np.int64)
    sides = [[abi.contiguous(side, np.int64) for side in (each.source, each.target)] for each in echoes]
    sources, targets = (np.array([side.ctypes.data for side in one], np.uintp) for one in zip(*sides, strict=True))
    args.num_echoes, args.echo_source, args.echo_target = (array.ctypes.data for array in (counts, sources, targets))
    return [counts, sides, sources, targets]


def _list_args(name: str, lists: TokenLists) -> dict[str, NDArray[Any] | None]:
    if not len(lists.starts):
        return {f"{name}_starts": None}
    args: dict[str, NDArray[Any] | None] = {
        f"{name}_starts": abi.contiguous(lists.starts, np.int32),
        f"{name}_ids": abi.contiguous(lists.token_ids, np.int32),
    }
    if name == "bias":
        args["bias_values"] = abi.contiguous(lists.values, np.float32)
    return args


def _logprobs(out: dict[str, NDArray[Any]], row: int, count: int) -> Logprobs | None:
    if not count:
        return None
    top = zip(out["top_ids"][row, :count].tolist(), out["top_logprobs"][row, :count].tolist(), strict=True)
    return Logprobs(int(out["token_ids"][row]), float(out["logprobs"][row]), int(out["ranks"][row]), tuple(top))
