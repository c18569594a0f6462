"""One rank of a tensor group in a process of its own: `python rank_process.py RANK SIZE STORE` prints its greedy tokens.

Its program is compiled for the cpu; the step's collectives go through torch.distributed (gloo).
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from lowered import Compiled, make_plan
from ranks import Model, random_module

from inferc import weights as weight_lib
from inferc.codegen.cpp.build import build
from inferc.codegen.cpp.emit import emit
from inferc.codegen.kernels import Target
from inferc.config import EngineConfig
from inferc.passes.partition import Ranks, partition
from inferc.passes.pipeline import LowerConfig
from inferc.passes.plan_memory import memory_plan
from inferc.program import Program
from inferc.runtime import abi
from inferc.runtime.model_runner import ModelRunner

PROMPT = [5, 17, 80, 3, 41]
NUM_TOKENS = 8


class CompiledRank(Compiled):
    """A lowered program compiled in memory, with the face of a loaded artifact."""

    def __init__(self, program: Program, reader: weight_lib.TensorReader) -> None:
        plan = memory_plan(program)
        self.lowered, self.isas = program, abi.detect_isa()[:1]
        self.unit = emit(program, plan.values, plan.pools)
        self.libraries = build(self.unit.source, self.unit.headers, self.isas)
        self.weights = tuple(program.weights)
        self.tensors = {name: weight_lib.read_whole(weight, reader) for name, weight in program.weights.items()}
        self.finish(program.block_size, int(program.info["max_model_len"]), int(program.info["vocab_size"]))


def main(rank: int, size: int, store: str) -> list[int]:
    model = Model(random_module("llama"))
    own = partition(model.prepared, LowerConfig(Target("cpu"), block_size=16), Ranks(tp=size))[rank]
    compiled = CompiledRank(own.program, model.reader)
    runner = ModelRunner(compiled, EngineConfig(num_threads=2, max_num_seqs=2, kv_memory_bytes=1 << 20), poison=True)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        runner.set_collective(exchange)
    out, new, cached = [], PROMPT, 0
    for _ in range(NUM_TOKENS):
        runner.submit(make_plan([(0, new, cached)]))
        result = runner.wait()
        if result.error is not None:
            raise RuntimeError(result.error)
        cached, new = cached + len(new), result.token_ids.tolist()
        out += new
    runner.close()
    if size > 1:
        dist.destroy_process_group()
    return out


def exchange(op: int, group: int, address: int, count: int) -> None:
    """The sum over the ranks, in place; the model is float32 and has one group."""
    if (op, group) != (0, 0):
        raise RuntimeError(f"collective {op} of group {group}: expected a float32 sum of tensor ranks")
    memory: Any = (ctypes.c_float * count).from_address(address)
    dist.all_reduce(torch.frombuffer(memory, dtype=torch.float32))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
