"""Logits of a checkpoint by transformers, by a lowered program and by an artifact's kernels, for comparing them.

Greedy tokens do not: an activation that is slightly another gives the same ones.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from inferc.backends.lower import LowerConfig, lower
from inferc.compiler.run_kernels import run_kernels
from inferc.frontend.capture import capture
from inferc.frontend.checkpoint.load import load
from inferc.ir.reference import run_sequence, weight_reader
from inferc.targets import Target

TOLERANCE = 1e-5  # of the largest logit, in float32
LENGTHS = (40, 13)  # the first beyond the windows of the table of families


def prompts() -> list[list[int]]:
    source = random.Random(7)
    return [[source.randrange(5, 300) for _ in range(length)] for length in LENGTHS]


def by_transformers(folder: Path) -> list[Tensor]:
    """Float32 logits [T, vocab_size] of each prompt, as whoever calls `from_pretrained` gets them."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return logits_of(model.eval())


def logits_of(model: Any) -> list[Tensor]:
    """Return the logits of a loaded model of transformers."""
    with torch.no_grad():
        return [model(input_ids=torch.tensor([each]), use_cache=False).logits[0] for each in prompts()]


def by_program(folder: Path, target: str = "cpu", dtype: str = "float32") -> list[Tensor]:
    """Return the logits of the program lowered for `target`, run by the ops' references.

    Every node of it has a kernel on that target.
    """
    checkpoint = load(folder)
    program = capture(checkpoint, dtype, 128)
    lower(program, LowerConfig(Target.parse(target)))
    return [run_sequence(program, each, weight_reader(program, checkpoint.reader)) for each in prompts()]


def by_kernels(artifact: Path) -> list[Tensor]:
    """Return the logits by an artifact's kernels, in chunks of 64 tokens at most."""
    return run_kernels(artifact, prompts(), 0)[1]


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference of two logits, relative to the largest logit."""
    largest = max(float(each.abs().max()) for each in expected)
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) / largest
