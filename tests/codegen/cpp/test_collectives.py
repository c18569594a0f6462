"""Ranks in processes of their own, each with its compiled program, exchanging through the step's host."""

import json
import os
import subprocess
import sys
from pathlib import Path

from lowered import make_plan
from rank_process import PROMPT, CompiledRank, main
from ranks import Model, random_module

from inferc.codegen.kernels import Target
from inferc.config import EngineConfig
from inferc.passes.partition import Ranks, partition
from inferc.passes.pipeline import LowerConfig
from inferc.runtime.model_runner import ModelRunner

SUPPORT = Path(__file__).parents[2] / "support"


def test_two_processes_give_the_tokens_of_one(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(SUPPORT)])}
    command = [sys.executable, str(SUPPORT / "rank_process.py")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        expected = main(0, 1, "")
        for each in ranks:
            out, err = each.communicate(timeout=300)
            assert each.returncode == 0, err
            assert json.loads(out) == expected
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    assert len(set(expected)) > 3


def test_a_step_that_has_no_one_to_exchange_with_is_refused() -> None:
    model = Model(random_module("llama"))
    own = partition(model.prepared, LowerConfig(Target("cpu"), block_size=16), Ranks(tp=2))[1]
    compiled = CompiledRank(own.program, model.reader)
    assert "all_reduce<float>(t, s, " in compiled.unit.source
    assert "all_gather<float>(t, s, " in compiled.unit.source
    runner = ModelRunner(compiled, EngineConfig(num_threads=1, max_num_seqs=2, kv_memory_bytes=1 << 20))
    try:
        runner.submit(make_plan([(0, PROMPT, 0)]))
        assert "step refused its arguments" in str(runner.wait().error)
        calls: list[tuple[int, int, int]] = []
        runner.set_collective(lambda op, group, address, count: calls.append((op, group, count)))
        runner.submit(make_plan([(0, PROMPT, 0)]))
        assert runner.wait().error is None
    finally:
        runner.close()
    # Two sums a layer, of the last layer on the one row that is sampled; then the logits' gather.
    rows = len(PROMPT)
    assert calls == [(0, 0, size) for size in (rows * 32, rows * 32, 32, 32, 96)]
