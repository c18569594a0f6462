"""The Triton kernel: its numbers under the interpreter, its resources, its launch record, and a GPU if there is one."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from inferc.codegen.kernels import select
from inferc.codegen.target import Target
from inferc.errors import VerifyError
from inferc.program import new_program

pytest.importorskip("triton")

from inferc.codegen.triton.build import Cubin
from inferc.codegen.triton.launch import check_launch_record, read_entry, record_from_json
from inferc.codegen.triton.silu_mul import compiled, emit

WIDTH = 96
INTERPRETED = Path(__file__).parent / "interpreted_silu_mul.py"


@pytest.fixture(scope="module")
def cubin() -> Cubin:
    return compiled("bfloat16", True, "sm_90")


@pytest.fixture(scope="module")
def interpreted() -> dict[str, list[float]]:
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, INTERPRETED], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results: dict[str, list[float]] = json.loads(done.stdout)
    return results


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_numbers_under_the_interpreter(interpreted: dict[str, list[float]], dtype: str) -> None:
    cases = {case: pair for case, pair in interpreted.items() if case.startswith(dtype)}
    assert len(cases) == 6
    for case, (error, tolerance) in cases.items():
        assert error <= tolerance, case


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resources_stay_within_budget(arch: str, dtype: str) -> None:
    resources = compiled(dtype, True, arch).record.resources
    assert resources["stack_bytes"] == resources["local_bytes"] == 0, "registers spilled"
    assert resources["static_shared_bytes"] == 0
    assert resources["registers"] <= 32, "more would leave threads of a multiprocessor unused"


def test_an_odd_width_promises_nothing() -> None:
    record = compiled("bfloat16", False, "sm_80").record
    assert record.name == "triton.silu_mul.bfloat16.unaligned"
    assert {argument.divisible_by for argument in record.arguments} == {1}


def test_emit_reads_the_node() -> None:
    program = new_program()
    packed = program.graph.placeholder("packed")
    packed.meta["val"] = program.fake((4, 2 * WIDTH), torch.float32)
    halves = []
    for start in (0, WIDTH):
        half = program.graph.call_function(torch.ops.aten.slice.Tensor, (packed, -1, start, start + WIDTH))
        half.meta["val"] = packed.meta["val"][:, start : start + WIDTH]
        halves.append(half)
    node = program.graph.call_function(torch.ops.inferc.silu_mul.default, tuple(halves))
    node.meta["val"] = program.fake((4, WIDTH), torch.float32)
    target = Target.parse("cuda:sm_80")
    kernel = select(node, target)
    assert kernel.backend == "triton"
    record = kernel.load_emit()(node, target).record
    assert (record.name, record.op, record.arch) == ("triton.silu_mul.float32", "inferc.silu_mul", "sm_80")
    assert record.grid_for(num_tokens=4, num_columns=2500) == (4, 3, 1)
    assert emit(node, target) is compiled("float32", True, "sm_80")


def test_the_record_survives_json(cubin: Cubin) -> None:
    assert record_from_json(json.loads(json.dumps(cubin.record.to_json()))) == cubin.record


def test_the_entry_takes_two_scratch_pointers(cubin: Cubin) -> None:
    info = read_entry(cubin.data, cubin.record.entry, "silu_mul")
    assert [size for _, size in info.parameters] == [8, 8, 8, 4, 4, 4, 4, 8, 8]
    assert (info.threads, info.arch) == (128, "sm_90")
    assert [argument.name for argument in cubin.record.arguments[-2:]] == ["global_scratch", "profile_scratch"]


def test_no_path_of_the_compiling_machine_is_kept(cubin: Cubin) -> None:
    assert str(Path(__file__).parents[3]).encode() not in cubin.data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"entry": "other"}, "triton.silu_mul.bfloat16: the cubin has no entry other; it has silu_mul_kernel"),
        ({"num_warps": 8}, "triton.silu_mul.bfloat16: the cubin wants 128 threads, its record says 256"),
        ({"arch": "sm_80"}, "triton.silu_mul.bfloat16: the cubin is for sm_90, its record says sm_80"),
    ],
)
def test_a_wrong_record_is_refused(cubin: Cubin, change: dict[str, object], message: str) -> None:
    with pytest.raises(VerifyError) as error:
        check_launch_record(dataclasses.replace(cubin.record, **change), cubin.data)  # type: ignore[arg-type]
    assert str(error.value) == message


def test_a_record_without_the_scratch_pointers_is_refused(cubin: Cubin) -> None:
    record = dataclasses.replace(cubin.record, arguments=cubin.record.arguments[:-2])
    with pytest.raises(VerifyError, match="takes parameters of"):
        check_launch_record(record, cubin.data)


def test_arguments_out_of_order_are_refused(cubin: Cubin) -> None:
    first, *rest = cubin.record.arguments
    record = dataclasses.replace(cubin.record, arguments=(*rest[:3], first, *rest[3:]))
    with pytest.raises(VerifyError, match="takes parameters of"):
        check_launch_record(record, cubin.data)


@pytest.mark.parametrize("data", [b"", b"not a cubin", b"\x7fELF\x02" + bytes(200)])
def test_what_is_no_cubin_is_refused(cubin: Cubin, data: bytes) -> None:
    with pytest.raises(VerifyError, match="not a CUDA ELF file"):
        check_launch_record(cubin.record, data)


def test_a_grid_is_no_python(cubin: Cubin) -> None:
    record = dataclasses.replace(cubin.record, grid=("__import__('os')", "1", "1"))
    with pytest.raises(VerifyError, match="a grid may hold"):
        record.grid_for(num_tokens=1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("num_tokens", "num_columns"), [(1, 96), (3, 1000), (5, 8192), (257, 14336)])
def test_numbers_on_the_gpu(dtype: torch.dtype, num_tokens: int, num_columns: int) -> None:
    """The cubin through the driver API, as a runner launches it, against the reference."""
    from inferc.codegen.triton.driver import CudaDriver

    packed = torch.randn(num_tokens, 2 * num_columns, device="cuda").mul(4).to(dtype)
    gate, up = packed[:, :num_columns], packed[:, num_columns:]
    out = torch.full((num_tokens, num_columns), float("nan"), dtype=dtype, device="cuda")
    driver = CudaDriver()
    name = str(dtype).removeprefix("torch.")
    built = compiled(name, num_columns % 16 == 0, driver.arch)
    driver.load(built.data, built.record).launch(
        torch.cuda.current_stream().cuda_stream,
        num_tokens,
        gate_ptr=gate.data_ptr(),
        up_ptr=up.data_ptr(),
        out_ptr=out.data_ptr(),
        num_columns=num_columns,
        gate_stride=gate.stride(0),
        up_stride=up.stride(0),
        out_stride=out.stride(0),
    )
    torch.cuda.synchronize()
    tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(out, torch.ops.inferc.silu_mul(gate, up), rtol=tolerance, atol=tolerance)
