"""The price of a certificate before it is made: how often the model is computed, and about how long that takes here.

A model's forward pass takes two operations for each of its parameters and tokens. Around the products, weights are read
and widened and logits compared, which takes several times as long. What is short of memory takes longer than its price.
"""

from __future__ import annotations

import time

import torch

from inferc.compiler.prompts import GREEDY_TOKENS, LONG_TOKENS, PROMPT_LENGTHS
from inferc.ir.layer_kinds import distinct_prefix, layer_kinds
from inferc.ir.program import Program, named_arguments

TRIALS = 6  # runs of a short model: three trials, each by two programs
SHORT_TOKENS = 100  # of a trial, or some more
PASSES = 15  # that compute something else than the pass before, in most models
# How many times as long as its products a certificate took: 5.8 s for SmolLM2-135M and 18.5 s for the shape of
# Qwen3-0.6B by auto, 16 s for SmolLM2-135M by full, on two cores.
AROUND = {"auto": 3.0, "full": 4.0}
PROBE = (256, 1024)  # rows, and columns of the square weight, of the product that is timed
PROBES = 6


def price(certify: str, program: Program) -> str:
    """Return what a certificate ("auto" or "full") computes and about how long that takes, as "about 12 s: …".

    program: as captured. What takes less than two seconds has no time: to measure the machine would be most of it.
    """
    num_layers = max(1, program.info.num_attention_layers)
    copies = 1 if program.info.dtype == "float32" else 2  # the reference, and transformers' own run in the dtype
    if certify == "full":
        lengths = sum(PROMPT_LENGTHS)
        tokens = lengths * (copies + PASSES) + len(PROMPT_LENGTHS) * GREEDY_TOKENS * 2
        what = f"the whole model after each of some {PASSES} passes, over {lengths} tokens"
    else:
        short = min(num_layers, distinct_prefix(layer_kinds(program)) + 2)  # the layers that stand for all
        tokens = LONG_TOKENS * (copies + 1) + TRIALS * SHORT_TOKENS * short // num_layers
        what = f"{short} of {num_layers} layers in float32, and the whole model over {LONG_TOKENS} tokens"
    return f"{_duration(AROUND[certify] * 2.0 * active_parameters(program) * tokens)}{what}"


def active_parameters(program: Program) -> int:
    """Return the size of the matrices that one token is multiplied by: of experts, those of the chosen ones."""
    total = sum(torch.Size(weight.shape).numel() for weight in program.weights.values() if len(weight.shape) > 1)
    for node in program.graph.nodes:
        if node.target != torch.ops.inferc.moe_experts.default:
            continue
        named = named_arguments(node)
        experts, chosen = int(named["gate_up"].meta["val"].shape[0]), int(named["expert_ids"].meta["val"].shape[-1])
        held = sum(named[each].meta["val"].numel() for each in ("gate_up", "down"))
        total -= held * (experts - chosen) // experts
    return total


def _duration(operations: float) -> str:
    """Return the time of so many operations on this machine in words, or nothing if it is short."""
    if operations < 150e9:  # which most processors do in two seconds
        return ""
    rows, columns = PROBE
    left, right = torch.zeros(rows, columns), torch.zeros(columns, columns)
    best = float("inf")
    for _ in range(PROBES):
        start = time.perf_counter()
        torch.mm(left, right)
        best = min(best, time.perf_counter() - start)
    seconds = operations * best / (2.0 * rows * columns * columns)
    return f"about {seconds:.0f} s: " if seconds < 100 else f"about {seconds / 60:.0f} min: "
