"""Compiled steps of several ranks that exchange through the step's host, against the references of the same ranks."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from cpp_kernels import assert_near
from lowered import Compiled, make_plan
from numpy.typing import NDArray
from ranks import Model, random_module, run
from torch import Tensor

from inferc.backends.lower import LowerConfig
from inferc.backends.partition import RankProgram, Ranks, partition
from inferc.codegen.cpp.build import build_program
from inferc.codegen.cpp.emit import emit
from inferc.config import EngineConfig
from inferc.errors import VerifyError
from inferc.ir import weights as weight_lib
from inferc.ir.program import Program, dtype_name
from inferc.ir.rendezvous import Rendezvous
from inferc.manifest_types import Observable
from inferc.passes.lower import plan_memory
from inferc.passes.lower.plan_memory import memory_plan
from inferc.passes.parallel.expert_placement import balanced
from inferc.runtime.artifact.numpy_dtypes import rounded, widened
from inferc.runtime.runners.cpu import abi
from inferc.runtime.runners.cpu.collectives import Bytes, Collectives, LocalGroup
from inferc.runtime.runners.cpu.runner import CpuRunner
from inferc.targets import Target

PROMPT = [5, 17, 80, 3, 41]
CPU = LowerConfig(Target.parse("cpu"))


class CompiledRank(Compiled):
    """A lowered program compiled in memory, with the face of a loaded artifact."""

    def __init__(self, program: Program, reader: weight_lib.TensorReader) -> None:
        plan = memory_plan(program)
        self.lowered, self.isas = program, abi.detect_isa()[:1]
        self.unit = emit(program, plan.values, plan.arena.pools)
        self.libraries = build_program(self.unit, self.isas)
        self.tensors = {name: weight_lib.read_whole(weight, reader) for name, weight in program.weights.items()}
        self.finish(program.block_size, program.info.max_model_len, program.info.vocab_size)


def logits_of(ranks: list[RankProgram], reader: Any, group: str) -> list[Tensor]:
    """Each rank's logits of every token of the prompt, the ranks joined in this process."""
    rendezvous = Rendezvous(len(ranks))
    config = EngineConfig(num_threads=2, max_num_seqs=2, kv_memory_bytes=1 << 20)
    runners, seen = [], [[] for _ in ranks]  # type: ignore[var-annotated]
    try:
        for index, rank in enumerate(ranks):
            compiled = CompiledRank(rank.program, reader)
            runner = CpuRunner(compiled, config, poison=True)
            runner.set_collective(Collectives({group: LocalGroup(index, rendezvous)}))
            last = compiled.program.observable[-1].id

            def observe(
                entry: Observable, _: int, rows: NDArray[Any], last: int = last, into: list[Any] = seen[index]
            ) -> None:
                if entry.id == last:
                    into.append(torch.from_numpy(rows))

            runner.set_observer(observe)
            runners.append(runner)
        for runner in runners:
            runner.submit(make_plan([(0, PROMPT, 0)], all_rows=True))
        for runner in runners:
            assert runner.wait().error is None
    finally:
        for runner in runners:
            runner.close()
    return [torch.cat(parts) for parts in seen]


def moe(dtype: torch.dtype) -> Model:
    module = random_module("mixtral", num_local_experts=8, num_experts_per_tok=2)
    return Model(module.to(dtype), dtype_name(dtype))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exchange", "dtype"),
    [
        pytest.param("all_to_all", torch.float32, marks=pytest.mark.slow),
        ("all_to_all", torch.bfloat16),
        ("all_reduce", torch.float32),
    ],
    ids=str,
)
def test_expert_ranks_compute_what_their_references_do(exchange: Any, dtype: torch.dtype) -> None:
    """Three ranks of three experts: one expert is on two of them, and five tokens do not divide."""
    model = moe(dtype)
    placements = dict.fromkeys(range(2), balanced([90, 5, 40, 5, 3, 30, 2, 1], 3, 1))
    ranks = Ranks(ep=3, placements=placements, exchange=exchange)
    (expected,) = run(model.ranks(ranks), model.reader, [PROMPT], 16)
    for found in logits_of(partition(model.prepared, CPU, ranks), model.reader, "ep"):
        # The logits of bfloat16 are float32 sums over bfloat16 rows, as far off as those are.
        assert_near(found.to(dtype), expected.to(dtype), factor=4.0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_tensor_ranks_compute_what_their_references_do(dtype: torch.dtype) -> None:
    model = Model(random_module("llama").to(dtype), dtype_name(dtype))
    (expected,) = run(model.ranks(Ranks(tp=2)), model.reader, [PROMPT], 16)
    for found in logits_of(partition(model.prepared, CPU, Ranks(tp=2)), model.reader, "tp"):
        assert_near(found.to(dtype), expected.to(dtype), factor=4.0)


@pytest.mark.slow
def test_exchanged_rows_with_gaps_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that pads rows of a multiple of 512 bytes would leave such gaps."""
    model = Model(random_module("llama", hidden_size=128))
    program = partition(model.prepared, CPU, Ranks(tp=2))[1].program
    emit(program, memory_plan(program).values, memory_plan(program).arena.pools)
    monkeypatch.setattr(plan_memory, "EXCHANGED", ())
    padded = memory_plan(program)
    with pytest.raises(VerifyError, match="rows of 128 elements, 144 apart; expected no gaps"):
        emit(program, padded.values, padded.arena.pools)


def test_sums_of_bfloat16_are_rounded_once() -> None:
    values = torch.tensor([1.0, 1.00390625, -2.5, 3.3895314e38, 1e-40, float("inf"), float("nan")])
    values = torch.cat((values, torch.randn(1000, generator=torch.Generator().manual_seed(0))))
    bits = rounded(values.numpy())
    expected = values.to(torch.bfloat16)
    assert torch.equal(torch.from_numpy(bits[:6].view(np.int16)), expected[:6].view(torch.int16))
    np.testing.assert_array_equal(widened(bits), expected.float().numpy())


class Listening:
    """Rank 1 of two, whose other rank has nothing to add."""

    def __init__(self) -> None:
        self.rank, self.size = 1, 2
        self.sizes: list[int] = []

    def all_reduce(self, data: NDArray[np.float32]) -> None:
        self.sizes.append(len(data))

    def exchange(self, send: Sequence[Bytes], receive: Sequence[Bytes]) -> None:
        raise AssertionError("tensor ranks exchange sums only")

    def abort(self) -> None:
        raise AssertionError("nothing fails here")


@pytest.mark.slow
def test_a_step_that_has_no_one_to_exchange_with_is_refused() -> None:
    model = Model(random_module("llama"))
    own = partition(model.prepared, CPU, Ranks(tp=2))[1]
    compiled = CompiledRank(own.program, model.reader)
    assert "all_reduce<float>(t, s, " in compiled.unit.source
    assert "all_gather<float, 2>(t, s, " in compiled.unit.source
    runner = CpuRunner(compiled, EngineConfig(num_threads=1, max_num_seqs=2, kv_memory_bytes=1 << 20))
    try:
        runner.submit(make_plan([(0, PROMPT, 0)]))
        assert "step refused its arguments" in str(runner.wait().error)
        group = Listening()
        runner.set_collective(Collectives({"tp": group}))
        runner.submit(make_plan([(0, PROMPT, 0)]))
        assert runner.wait().error is None
    finally:
        runner.close()
    # Two sums a layer, of the last layer on the one row that is sampled; then the logits' gather.
    rows = len(PROMPT)
    assert group.sizes == [rows * 32, rows * 32, 32, 32, 96]
