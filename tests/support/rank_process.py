"""Run one rank of an artifact in its own process: `python rank_process.py ARTIFACT INDEX STORE` prints its tokens.

Tensor and expert ranks exchange, and stages hand rows on, through torch.distributed (gloo).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from lowered import make_plan

from inferc.config import EngineConfig
from inferc.runtime.artifact.load import Artifact, load_artifact
from inferc.runtime.runners.cpu.collectives import Collectives
from inferc.runtime.runners.cpu.process_group import ProcessGroup, receive_rows, send_rows
from inferc.runtime.runners.cpu.runner import CpuRunner

PROMPT = [5, 17, 80, 3, 41]
NUM_TOKENS = 8


def main(path: Path, index: int, store: str) -> list[int]:
    artifact = load_artifact(path)
    rank, size = artifact.ranks[index], len(artifact.ranks)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=size)
    runner = CpuRunner(rank, EngineConfig(num_threads=2, max_num_seqs=2, kv_memory_bytes=1 << 20), poison=True)
    stages: dict[int, list[int]] = {}
    for at, each in enumerate(artifact.ranks):
        stages.setdefault(each.entry.pp_stage, []).append(at)
    groups = {stage: dist.new_group(members) for stage, members in stages.items()}  # by all processes, in one order
    stage = rank.entry.pp_stage
    if len(stages[stage]) > 1:
        name = "ep" if rank.config.ep > 1 else "tp"
        runner.set_collective(Collectives({name: ProcessGroup(groups[stage])}))
    place = stages[stage].index(index)
    out: list[int] = []
    new, cached = PROMPT, 0
    for _ in range(NUM_TOKENS):
        rows = None
        if stage:
            rows = np.empty((len(new), hidden_size(rank)), np.float32)
            receive_rows(rows, stages[stage - 1][place])
        runner.submit(make_plan([(0, new, cached)], block_size=rank.block_size), rows)
        result = runner.wait()
        if result.error is not None:
            raise RuntimeError(result.error)
        if result.hidden is not None:
            send_rows(result.hidden, stages[stage + 1][place])
        sampled = torch.tensor(result.token_ids if result.hidden is None else [-1], dtype=torch.int32)
        dist.broadcast(sampled, size - 1)
        cached, new = cached + len(new), sampled.tolist()
        out += new
    runner.close()
    dist.destroy_process_group()
    return out


def hidden_size(rank: Artifact) -> int:
    return int(rank.program.step.hidden.shape[1])


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
