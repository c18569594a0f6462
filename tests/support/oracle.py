"""The results of lowered programs by the reference ops alone, and models captured without checks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inferc.frontend.checkpoint.load import load_module
from inferc.frontend.export import export_model
from inferc.ir.program import Program
from inferc.ir.reference import ReadWeight, new_batch


def export_module(module: torch.nn.Module, dtype: str = "bfloat16", max_model_len: int | None = None) -> Program:
    """Capture a transformers causal LM in memory without checks; `load_module(module).reader` reads its weights."""
    return export_model(load_module(module), dtype, max_model_len)


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
