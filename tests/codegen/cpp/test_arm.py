"""AArch64 in an emulator: its bits are those of AVX2, and whole steps are compared with this machine's.

The kernels alone are tested together with those of other instruction sets (conftest.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from arm import ARM_ISAS, ArmKernels, Process, build_arm, needs_arm
from cpp_kernels import DTYPES, ISAS, Kernels, assert_near, group_panels, packed
from lowered import as_torch, make_plan
from numpy.typing import NDArray
from torch import Tensor

from inferc.codegen.cpp.build import Unit
from inferc.compiler.build import compile
from inferc.config import CompileConfig, EngineConfig
from inferc.ir.ops import quantize as reference
from inferc.manifest_types import Observable
from inferc.runtime.artifact.load import Artifact, load_artifact
from inferc.runtime.runners.cpu import abi
from inferc.runtime.runners.cpu.runner import CpuRunner
from inferc.runtime.step.plan import StepPlan

ops = torch.ops.inferc
pytestmark = [
    *needs_arm,
    pytest.mark.slow,
    pytest.mark.skipif("avx2" not in ISAS, reason="what it is compared with needs AVX2"),
]


@pytest.fixture(scope="module", params=ARM_ISAS)
def both(request: pytest.FixtureRequest) -> Iterator[tuple[Kernels, Kernels]]:
    made = ArmKernels(request.param), Kernels("avx2")
    yield made
    for kernels in made:
        kernels.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=("float32", "bfloat16"))
def test_integers_have_the_bits_of_avx2(both: tuple[Kernels, Kernels], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    for rows, n, k, group in ((1, 40, 131, 32), (5, 65, 520, 64), (70, 33, 290, 128)):
        x, x_scale = ops.quantize_rows(torch.randn(rows, k))
        bias, residual = torch.randn(n).to(dtype), torch.randn(rows, n).to(dtype)
        weight, scale = torch.randint(-127, 128, (n, k), dtype=torch.int8), torch.rand(n) / 73
        bits, of_groups, bits_scale = reference.quantize_int4(torch.randn(n, k), group)
        args = (x, k, x_scale, rows, packed(weight), n, k, scale, bias, residual)
        more = (packed(bits), group_panels(of_groups), bits_scale, n, k, group, bias, residual)
        for name, sent in (("test_linear_int8", args), ("test_linear_w4a8", (x, k, x_scale, rows, *more))):
            out = [torch.full((rows, n), float("nan"), dtype=dtype) for _ in both]
            for kernels, each in zip(both, out, strict=True):
                kernels.run(name, dtype, *sent, each)
            assert torch.equal(*out)


def test_functions_have_the_bits_of_avx2(both: tuple[Kernels, Kernels]) -> None:
    x = torch.cat((torch.linspace(-100, 95, 4001), torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 1e-40])))
    out = [torch.full_like(x, float("nan")) for _ in both]
    for kernels, each in zip(both, out, strict=True):
        kernels("test_exp", x, len(x), each)
    assert torch.equal(*out)
    finite = x[:4001].clone()
    for function in range(5):
        out = [torch.full_like(finite, float("nan")) for _ in both]
        for kernels, each in zip(both, out, strict=True):
            kernels("test_function", kernels.threads, function, finite, len(finite), each)
        assert torch.equal(*out)


# ------------------------------------------------------------------------------------------ a whole step

STEPS = {
    "bfloat16": CompileConfig(dtype="bfloat16", certify="none"),
    "w8a8": CompileConfig(dtype="bfloat16", quantize="w8a8", certify="none"),
}


@pytest.fixture(scope="module")
def artifact(
    request: pytest.FixtureRequest, tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Artifact:
    out = tmp_path_factory.mktemp("arm") / "artifact"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INFERC_ISAS", "avx2")
        compile(tiny_llama_folder, out, STEPS[request.param])
    return load_artifact(out)


def logits_of(artifact: Artifact) -> Observable:
    """The observable value that is a step's last."""
    entry = artifact.program.observable[-1]
    assert (entry.dtype, entry.shape) == ("float32", [artifact.vocab_size])
    return entry


def logits_here(artifact: Artifact, plan: StepPlan) -> Tensor:
    runner = CpuRunner(artifact, EngineConfig(max_num_seqs=4, max_num_batched_tokens=128, kv_memory_bytes=1 << 20))
    seen: list[Tensor] = []
    logits = logits_of(artifact)
    runner.set_observer(lambda entry, _, rows: seen.append(as_torch(rows)) if entry == logits else None)
    try:
        runner.score(plan, np.zeros(len(plan.logits_rows), np.int32))
    finally:
        runner.close()
    return torch.cat(seen)


def logits_on_arm(artifact: Artifact, isa: str, plan: StepPlan) -> Tensor:
    """Return the logits that the same source computes for AArch64 from the same weights."""
    source = (artifact.path / "kernels/cpp/unit.cpp").read_text()
    process = Process(build_arm([Unit(source)], isa), isa)
    put, rows, threads, blocks = process.put, len(plan.logits_rows), 2, 40
    maxima = [-(-count // 64) * 64 for count in (plan.num_tokens, plan.num_seqs, rows)]
    arena = put(np.full(artifact.memory.arena_bytes(maxima[0], maxima[2], maxima[1], threads), 255, np.uint8))
    pool = put(np.full(blocks * artifact.block_size * artifact.kv_bytes_per_token, 255, np.uint8))

    def table(*addresses: int) -> int:
        return put(np.array(addresses, np.uintp))

    step = abi.StepArgs(abi.ABI, plan.num_tokens, plan.num_seqs, rows, *maxima)
    for name in ("token_ids", "positions", "query_start_loc", "seq_lens", "seq_slots", "logits_rows"):
        setattr(step, name, put(getattr(plan, name)))
    step.slot_mapping, step.block_table = table(put(plan.slot_mapping[0])), table(put(plan.block_tables[0]))
    step.max_blocks, step.kv_cache = put(np.array([plan.block_tables[0].shape[1]], np.int64)), table(pool)
    step.weights = table(*(put(artifact.view(weight)) for weight in artifact.weights))
    step.threads = process.call("inferc_threads_open", threads, 0, returns=ctypes.c_int64)
    stored = put(step)

    vocab = artifact.vocab_size
    logits = put(np.full((rows, vocab), np.nan, np.float32))
    record = put(np.array([logits_of(artifact).id, 4 * vocab, logits], np.int64))
    host = put(abi.InfercHost(abi.ABI, record, abi.OBSERVE(process.symbol("record")), observed_node=-1))
    score = abi.ScoreArgs(None, vocab, *(put(np.zeros(rows, np.int32)) for _ in range(3)))
    score.step = ctypes.cast(stored, ctypes.POINTER(abi.StepArgs))
    assert process.call("inferc_step", host, stored, arena) == 0
    assert process.call("inferc_score", host, put(score), arena) == 0
    found: NDArray[np.float32] = np.frombuffer(process.read(logits, 4 * rows * vocab), np.float32)
    process.call("inferc_threads_close", step.threads)
    process.close()
    return torch.from_numpy(found.reshape(rows, vocab).copy())


@pytest.mark.parametrize(
    ("artifact", "isa"),
    [("bfloat16", "neon_bf16"), ("bfloat16", "neon"), pytest.param("w8a8", "neon", marks=pytest.mark.slow)],
    indirect=["artifact"],
)
def test_a_step_is_that_of_this_machine(artifact: Artifact, isa: str) -> None:
    """The bits of neon are those of AVX2, as it adds in the same order; neon_bf16 rounds within pairs otherwise."""
    ids = [int(token) for token in np.random.default_rng(0).integers(5, 300, 61)]
    plan = make_plan([(0, ids, 0), (2, ids[:5], 0), (1, ids[7:8], 0)], block_size=artifact.block_size, all_rows=True)
    found, expected = logits_on_arm(artifact, isa, plan), logits_here(artifact, plan)
    assert_near(found.bfloat16(), expected.bfloat16(), factor=6.0)
    assert (found - expected).abs().median() < 0.02 * expected.abs().max()
    if isa == "neon":
        assert torch.equal(found, expected)
