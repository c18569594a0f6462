"""The results of lowered programs by the reference ops alone, and models captured without checks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inferc.frontend.checkpoint.load import load_module
from inferc.frontend.export import export_model
from inferc.ir.program import Program
from inferc.ir.reference import (
    Chunk,
    ReadWeight,
    dense_inputs,
    new_dense_caches,
    new_kv_caches,
    run_step,
    step_inputs,
    uses_dense_cache,
)


def export_module(module: torch.nn.Module, dtype: str = "bfloat16", max_model_len: int | None = None) -> Program:
    """Capture a transformers causal LM in memory without checks; `load_module(module).reader` reads its weights."""
    return export_model(load_module(module), dtype, max_model_len)


class Batch:
    """A few sequences over one paged KV cache, each with enough blocks for `max_len` tokens."""

    def __init__(self, program: Program, read_weight: ReadWeight, num_seqs: int, max_len: int) -> None:
        self.program, self.read_weight = program, read_weight
        each = -(-max_len // program.block_size)
        self.caches = new_kv_caches(program, 1 + num_seqs * each)
        self.blocks = [range(1 + i * each, 1 + (i + 1) * each) for i in range(num_seqs)]
        self.lengths = [0] * num_seqs

    def step(self, new: dict[int, Sequence[int]], all_rows: bool = True) -> dict[int, Tensor]:
        """Append `new` token ids to sequences; return the logits [rows, vocab_size] of each sequence."""
        chunks = []
        for seq, ids in new.items():
            used = -(-(self.lengths[seq] + len(ids)) // self.program.block_size)
            chunks.append(Chunk(ids, self.lengths[seq], self.blocks[seq][:used], seq))
            self.lengths[seq] += len(ids)
        inputs = step_inputs(self.program, chunks, self.caches, all_rows)
        _, logits = run_step(self.program, inputs, self.read_weight)
        parts = logits.split([len(ids) if all_rows else 1 for ids in new.values()])
        return dict(zip(new, parts))


class DenseBatch:
    """A few sequences over a dense KV cache; sequences with equally many new tokens are computed in one call."""

    def __init__(self, program: Program, read_weight: ReadWeight, num_seqs: int, max_len: int) -> None:
        self.program, self.read_weight = program, read_weight
        self.caches = new_dense_caches(program, num_seqs, max_len)
        self.lengths = [0] * num_seqs

    def step(self, new: dict[int, Sequence[int]], all_rows: bool = True) -> dict[int, Tensor]:
        """Append `new` token ids to sequences; return the logits [rows, vocab_size] of each sequence."""
        by_length: dict[int, list[int]] = {}
        for seq, ids in new.items():
            by_length.setdefault(len(ids), []).append(seq)
        found: dict[int, Tensor] = {}
        for count, seqs in by_length.items():
            caches = {name: cache[seqs] for name, cache in self.caches.items()}
            inputs = dense_inputs([new[seq] for seq in seqs], [self.lengths[seq] for seq in seqs], caches, all_rows)
            _, logits = run_step(self.program, inputs, self.read_weight)
            for name, cache in self.caches.items():
                cache[seqs] = caches[name]
            for seq in seqs:
                self.lengths[seq] += count
            found.update(zip(seqs, logits.split(count if all_rows else 1), strict=True))
        return {seq: found[seq] for seq in new}


def new_batch(program: Program, read_weight: ReadWeight, num_seqs: int, max_len: int) -> Batch | DenseBatch:
    """Create a Batch or a DenseBatch, whichever fits the KV cache of the program."""
    return (DenseBatch if uses_dense_cache(program) else Batch)(program, read_weight, num_seqs, max_len)


def run_lowered(
    program: Program, read_weight: ReadWeight, prompts: Sequence[Sequence[int]], chunk_size: int | None = None
) -> list[Tensor]:
    """Compute the logits, float32 [len(prompt), vocab_size], of each prompt, run as one batch.

    With `chunk_size`, every step computes at most that many tokens of each prompt.
    """
    longest = max(len(prompt) for prompt in prompts)
    batch = new_batch(program, read_weight, len(prompts), longest)
    out: list[list[Tensor]] = [[] for _ in prompts]
    step = chunk_size or longest
    for start in range(0, longest, step):
        new = {seq: prompt[start : start + step] for seq, prompt in enumerate(prompts) if start < len(prompt)}
        for seq, logits in batch.step(new).items():
            out[seq].append(logits)
    return [torch.cat(parts) for parts in out]


def generate_greedy(
    program: Program, read_weight: ReadWeight, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[list[int]]:
    """Generate `num_tokens` greedy tokens after each prompt; of equal logits the lowest id wins."""
    batch = new_batch(program, read_weight, len(prompts), max(map(len, prompts)) + num_tokens)
    new: dict[int, Sequence[int]] = dict(enumerate(prompts))
    out: list[list[int]] = [[] for _ in prompts]
    for _ in range(num_tokens):
        logits = batch.step(new, all_rows=False)
        new = {seq: [int(row[0].argmax())] for seq, row in logits.items()}
        for seq, ids in new.items():
            out[seq].extend(ids)
    return out
