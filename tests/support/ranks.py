"""Runs the programs of all ranks in one process, with the references: for tests of what partitioning makes."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from oracle import export_module
from random_models import SIZES
from torch import Tensor

from inferc.backends.lower import LowerConfig
from inferc.backends.partition import RankProgram, Ranks, partition, prepare
from inferc.frontend.checkpoint.load import load_module
from inferc.ir.program import Program
from inferc.ir.reference import run_partitioned
from inferc.targets import Target

SMALL = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 96}
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
CONFIG = LowerConfig(Target.parse("reference"), block_size=16)


def random_module(family: str, **fields: Any) -> Any:
    """A tiny float32 model of a family, with no weight or bias neutral."""
    transformers: Any = importlib.import_module("transformers")
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **SMALL, **TOKENS, **fields})
    torch.manual_seed(0)
    module = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for parameter in module.parameters():
        mean, deviation = (0.5, 0.3) if parameter.dim() == 1 else (0.0, 0.2)
        torch.nn.init.normal_(parameter, mean, deviation)
    return module


class Model:
    """A random module, captured and prepared for the partition once."""

    def __init__(self, module: Any, dtype: str = "float32") -> None:
        self.reader = load_module(module).reader
        self.prepared = export_module(module, dtype)
        prepare(self.prepared, CONFIG)

    def ranks(self, ranks: Ranks) -> list[RankProgram]:
        return partition(self.prepared, CONFIG, ranks)

    def whole(self) -> list[RankProgram]:
        return self.ranks(Ranks())


def run(programs: Sequence[RankProgram], reader: Any, prompts: Sequence[Sequence[int]], chunk: int) -> list[Tensor]:
    """Logits of all prompt tokens in steps of `chunk` tokens."""
    last = max(each.pp_stage for each in programs)
    stages = [[each.program for each in programs if each.pp_stage == stage] for stage in range(last + 1)]
    return run_partitioned(stages, reader, prompts, chunk)


def weight_bytes(program: Program) -> int:
    return sum(weight.num_bytes for weight in program.weights.values())
