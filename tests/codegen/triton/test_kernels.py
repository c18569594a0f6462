"""Every Triton kernel: its numbers under the interpreter and on a GPU if there is one, and what it costs a chip."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from ctypes import c_void_p
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from all_cases import KERNELS, MORE
from attention_cases import depend_on_chunks, depend_on_their_step
from gemm_cases import depend_on_their_step as products_that_do
from real_gpu import chip, need_gpu
from triton_cases import Case

from inferc.codegen.triton.aot.build import Cubin, build
from inferc.codegen.triton.kernels.attention_decode import PREFIX_STACK_BYTES
from inferc.runtime.runners.cuda.driver import Driver

INTERPRETED = Path(__file__).parent / "interpreted.py"
SUPPORT = Path(__file__).parents[2] / "support"
ARCHS = ("sm_80", "sm_90", "sm_100")


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, list[list[float]]]]:
    """The errors and tolerances of all cases, by kernel and case."""
    results: dict[str, dict[str, list[list[float]]]] = run_interpreted("kernels")
    return results


def run_interpreted(part: str) -> Any:
    path = os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, str(INTERPRETED), part]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("kernel", KERNELS)
def test_numbers_under_the_interpreter(interpreted: dict[str, dict[str, list[list[float]]]], kernel: str) -> None:
    found = interpreted[kernel]
    assert list(found) == [case.name for case in KERNELS[kernel]()]
    wrong = {name: pair for name, pairs in found.items() for pair in pairs if not pair[0] <= pair[1]}
    assert not wrong, wrong


@pytest.mark.slow
def test_the_benchmark_launches_what_it_compares() -> None:
    found = run_interpreted("benchmark")
    kernels = {"rms_norm", "decode_attention", "prefill_attention"}
    kernels |= {"linear", "linear_int8", "linear_silu_mul", "linear_silu_mul_int8"}
    assert {name.partition(" ")[0] for name in found} == kernels
    assert all(error <= tolerance for pairs in found.values() for error, tolerance in pairs), found


@pytest.mark.slow
def test_the_invariant_order_depends_neither_on_the_batch_nor_on_chunks() -> None:
    assert run_interpreted("depends") == []


@pytest.mark.parametrize("which", ["one", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "arch", [arch if arch == "sm_90" else pytest.param(arch, marks=pytest.mark.slow) for arch in ARCHS]
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_compiles_within_its_budget(kernel: str, arch: str, which: str) -> None:
    """`build` refuses what spills more than its source allows, does not fit a chip, or not its launch record."""
    cases = list(KERNELS[kernel]())
    narrow = [case for case in cases if {"*bf16", "*i8"} & set(case.source.signature.values())]
    most = PREFIX_STACK_BYTES if kernel == "prefix_attention" else 8 if kernel in MORE else 32
    for case in cases if which == "all" else (narrow or cases)[-1:]:
        build(case.source, kernel, "", arch)
        assert case.source.stack_bytes <= most


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_activation_leaves_no_thread_of_a_chip_unused(arch: str) -> None:
    for case in KERNELS["silu_mul"]():
        if case.source.constants["WIDTH"] % 16 == 0:
            resources = build(case.source, "silu_mul", "", arch).record.resources
            assert resources["registers"] <= 32 and resources["static_shared_bytes"] == 0, case.name


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_numbers_on_the_gpu(kernel: str) -> None:
    """The cubin through the driver API, as a runner launches it, with a grid larger than the step."""
    cases = [(case, build(case.source, kernel, "", chip())) for case in KERNELS[kernel]()]
    need_gpu(f"{len(cases)} kernels")
    driver = Driver()
    for case, built in cases:
        for error, tolerance in case.errors(launched(driver, built, case)):
            assert error <= tolerance, case.name


@pytest.mark.gpu
def test_the_invariant_order_depends_on_neither_on_the_gpu() -> None:
    num_built = 0

    def compiled(case: Case) -> dict[str, torch.Tensor]:
        nonlocal num_built
        build(case.source, "a kernel", "", chip())
        num_built += 1
        return case.tensors

    depending(compiled)
    need_gpu(f"{num_built} launches")
    driver = Driver()
    assert depending(lambda case: launched(driver, build(case.source, "a kernel", "", driver.arch), case)) == []


def depending(run: Callable[[Case], dict[str, torch.Tensor]]) -> list[str]:
    return [*depend_on_their_step(run), *depend_on_chunks(run), *products_that_do(run)]


def launched(driver: Driver, built: Cubin, case: Case) -> dict[str, torch.Tensor]:
    """The case's tensors after it."""
    moved = {name: on_gpu(tensor) for name, tensor in case.tensors.items()}
    pointers = {name: tensor.data_ptr() for name, tensor in moved.items()}
    counts = {name: count + 3 for name, count in case.counts.items()}
    stream = c_void_p(torch.cuda.current_stream().cuda_stream)
    driver.load(built.data, built.record).launch(stream, counts, **pointers)
    torch.cuda.synchronize()
    return {name: tensor.cpu() for name, tensor in moved.items()}


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """A view of its storage on the GPU, at the same offset and with the same strides."""
    size = tensor.untyped_storage().nbytes() // tensor.itemsize
    whole = tensor.as_strided((size,), (1,), 0).cuda()
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
