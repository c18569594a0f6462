"""Runs the programs of all ranks in one process, with the references: for tests of what partitioning makes."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from random_models import SIZES
from torch import Tensor

from inferc.codegen.kernels import Target
from inferc.frontend.export import export_module
from inferc.frontend.load import load_module
from inferc.ops import run_ranks
from inferc.passes.partition import RankProgram, Ranks, partition, prepare
from inferc.passes.pipeline import LowerConfig
from inferc.program import Program
from inferc.reference import IN_PLACE, Chunk, new_kv_caches, step_inputs, weight_reader

SMALL = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 96}
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
CONFIG = LowerConfig(Target("reference"), block_size=16)


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

    def __init__(self, module: Any) -> None:
        self.reader = load_module(module).reader
        self.prepared = export_module(module, "float32")
        prepare(self.prepared, CONFIG)

    def ranks(self, ranks: Ranks) -> list[RankProgram]:
        return partition(self.prepared, CONFIG, ranks)

    def whole(self) -> list[RankProgram]:
        return self.ranks(Ranks())


class Rank:
    """One rank's program with caches of its own."""

    def __init__(self, program: Program, reader: Any, num_seqs: int, max_len: int) -> None:
        self.program, self.read_weight = program, weight_reader(program, reader)
        each = -(-max_len // program.block_size)
        self.caches = new_kv_caches(program, 1 + num_seqs * each)

    def step(self, chunks: Sequence[Chunk], hidden: Tensor | None) -> Tensor:
        """Hidden rows, or the logits of every row on the last stage."""
        inputs = step_inputs(self.program, chunks, self.caches)
        if hidden is not None:
            inputs["hidden_in"] = hidden
        with torch.inference_mode():
            results = self.program.run(inputs, self.read_weight, calls=IN_PLACE)
        last: Tensor = results[-1]
        return last


def run(programs: Sequence[RankProgram], reader: Any, prompts: Sequence[Sequence[int]], chunk: int) -> list[Tensor]:
    """Logits of all prompt tokens in steps of `chunk` tokens, stage by stage, as rank 0 of the last stage has them."""
    longest = max(map(len, prompts))
    stages: dict[int, list[Rank]] = {}
    for each in programs:
        stages.setdefault(each.pp_stage, []).append(Rank(each.program, reader, len(prompts), longest))
    group = "ep" if "ep_rank" in programs[0].program.info else "tp"
    width = -(-longest // 16)
    out: list[list[Tensor]] = [[] for _ in prompts]
    for start in range(0, longest, chunk):
        seqs = [seq for seq, prompt in enumerate(prompts) if start < len(prompt)]
        new = [prompts[seq][start : start + chunk] for seq in seqs]
        chunks = [
            Chunk(ids, start, range(1 + seq * width, 1 + seq * width + -(-(start + len(ids)) // 16)), seq)
            for seq, ids in zip(seqs, new, strict=True)
        ]
        hidden: Tensor | None = None
        for ranks in stages.values():
            results = run_ranks(group, [partial(rank.step, chunks, hidden) for rank in ranks])
            for other in results[1:]:
                torch.testing.assert_close(other, results[0], rtol=0, atol=0)  # replicas never drift apart
            hidden = results[0]
        assert hidden is not None
        for seq, logits in zip(seqs, hidden.split([len(ids) for ids in new]), strict=True):
            out[seq].append(logits)
    return [torch.cat(parts) for parts in out]


def weight_bytes(program: Program) -> int:
    return sum(weight.num_bytes for weight in program.weights.values())
