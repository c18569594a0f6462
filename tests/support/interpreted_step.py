"""Runs the launches of a step in Triton's interpreter: what a GPU's runner does, with host memory for the device's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from triton_cases import to_pool

from inferc.codegen.triton.emit import CudaStep, emit
from inferc.codegen.triton.launch import evaluate_grid
from inferc.codegen.triton.source import Source
from inferc.passes.plan_memory import SAMPLE_ROWS, memory_plan
from inferc.program import Program

DTYPES = {
    "*fp32": torch.float32,
    "*bf16": torch.bfloat16,
    "*fp16": torch.float16,
    "*i32": torch.int32,
    "*i64": torch.int64,
    "*i8": torch.int8,
}
POISON = 0xFF  # bytes of NaN


class InterpretedStep:
    """Steps of at most `tokens` tokens and logits rows, of `seqs` sequences. caches: canonical, one a KV group."""

    def __init__(
        self, program: Program, read_weight: Callable[[str], Tensor], caches: list[Tensor], tokens: int, seqs: int
    ) -> None:
        self.plan = memory_plan(program)
        self.code: CudaStep = emit(program, self.plan.values)
        self.most = (tokens, tokens, seqs)
        self.weights = {name: read_weight(name).contiguous() for name in program.weights}
        self.pools = [to_pool(cache) for cache in caches]
        self.arena = torch.full((self.plan.arena_bytes(*self.most),), POISON, dtype=torch.uint8)
        self.spare = torch.zeros(16)
        self.launched: list[str] = []

    def run(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The logits [rows, vocab_size] of a step."""
        self.inputs = dict(inputs)
        rows = len(inputs["logits_rows"])
        counts = {"num_tokens": len(inputs["token_ids"]), "num_rows": rows, "num_seqs": len(inputs["seq_lens"])}
        for launch in self.code.step:
            self.launch(launch, counts, 0)
        logits = []
        for first in range(0, rows, SAMPLE_ROWS):
            part = {**counts, "num_rows": min(SAMPLE_ROWS, rows - first)}
            for launch in self.code.head:
                self.launch(launch, part, first)
            where = self.code.logits
            stored = self.at(where, torch.float32, 0)[: part["num_rows"] * where["stride"]]
            logits.append(stored.view(-1, where["stride"])[:, : where["width"]].clone())
        return torch.cat(logits)

    def launch(self, launch: Mapping[str, Any], counts: dict[str, int], first: int) -> None:
        number = counts[f"num_{launch['rows']}"]
        name = next(c["kernel"] for c in launch["choices"] if c["up_to"] is None or number <= c["up_to"])
        self.launched.append(name)
        source: Source = self.code.sources[name]
        step_counts = torch.tensor([*counts.values(), 0], dtype=torch.int32)
        values = [
            step_counts if where.get("counts") else self.argument(where, kind, first)
            for where, kind in zip(launch["arguments"].values(), source.signature.values(), strict=True)
        ]
        for name, value in zip(source.signature, values, strict=True):
            assert name not in source.aligned or value.data_ptr() % 16 == 0, f"{launch['node']}: {name}"
        constants = {**source.constants, **({"WIDE_DOT": 1} if "WIDE_DOT" in source.constants else {})}
        source.function[evaluate_grid(source.grid, {**source.constants, **counts})](*values, **constants)

    def argument(self, where: Mapping[str, Any], kind: str, first: int) -> Any:
        if "value" in where:
            return self.at(where, DTYPES[kind], first)
        if "weight" in where:
            return self.weights[where["weight"]]
        if "input" in where:
            return self.inputs[where["input"]]
        if "cache" in where:
            pool = self.pools[where["cache"]].view(-1)
            return pool[where["offset"] // pool.itemsize :]
        if "number" in where:
            return self.inputs[f"block_table_{where['group']}"].shape[1]
        return self.spare

    def at(self, where: Mapping[str, Any], dtype: torch.dtype, first: int) -> Tensor:
        pools, most = list(self.plan.pools), [-(-count // 64) * 64 for count in (*self.most, SAMPLE_ROWS)]
        index = pools.index(where["value"])
        start = sum(self.plan.pools[pool] * rows for pool, rows in zip(pools[:index], most, strict=False))
        start += where["offset"] * most[index] + where["column"] + where.get("shifted", 0) * first
        rest = self.arena[start:]
        return rest[: len(rest) // dtype.itemsize * dtype.itemsize].view(dtype)
