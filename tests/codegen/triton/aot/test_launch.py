"""Launch records: made with a cubin, kept as JSON, and checked against what the cubin says of itself."""

import dataclasses
from pathlib import Path

import msgspec
import pytest

from inferc.errors import VerifyError

pytest.importorskip("triton")

from triton_cases import KERNELS

from inferc.codegen.triton.aot.build import Cubin, TooMuchSharedMemory, build, build_fitting
from inferc.codegen.triton.aot.launch import check_launch_record, grid_for, read_entry
from inferc.codegen.triton.kernels.attention_decode import decode_attention
from inferc.codegen.triton.kernels.attention_plan import TILES, invariant_cells
from inferc.codegen.triton.kernels.attention_tiles import AttentionShape
from inferc.codegen.triton.kernels.linear import linear
from inferc.codegen.triton.kernels.silu_mul import silu_mul
from inferc.manifest import json_bytes
from inferc.manifest_types import LaunchRecord, read_typed


def compiled(arch: str, width: int = 4096, unaligned: tuple[str, ...] = ()) -> Cubin:
    source = silu_mul("bfloat16", "tokens", width, (2 * width, 2 * width, width), unaligned)
    return build(source, "silu_mul", "inferc.silu_mul", arch)


@pytest.fixture(scope="module")
def cubin() -> Cubin:
    return compiled("sm_90")


def test_an_odd_width_promises_nothing_of_the_second_half() -> None:
    record = compiled("sm_80", 1000, ("up_ptr",)).record
    promised = {argument.name: argument.divisible_by for argument in record.arguments}
    assert (promised["gate_ptr"], promised["up_ptr"]) == (16, 1)


def test_the_record_survives_json(cubin: Cubin) -> None:
    assert read_typed(json_bytes(cubin.record), LaunchRecord) == cubin.record


def test_the_entry_takes_two_scratch_pointers(cubin: Cubin) -> None:
    info = read_entry(cubin.data, cubin.record.entry, "silu_mul")
    assert [size for _, size in info.parameters] == [8, 8, 8, 8, 8, 8]
    assert (info.threads, info.arch) == (128, "sm_90")
    assert [argument.name for argument in cubin.record.arguments[-2:]] == ["global_scratch", "profile_scratch"]


def test_no_path_of_the_compiling_machine_is_kept(cubin: Cubin) -> None:
    assert str(Path(__file__).parents[4]).encode() not in cubin.data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"entry": "other"}, "silu_mul: the cubin has no entry other; it has silu_mul_kernel"),
        ({"num_warps": 8}, "silu_mul: the cubin wants 128 threads, its record says 256"),
        ({"arch": "sm_80"}, "silu_mul: the cubin is for sm_90, its record says sm_80"),
    ],
)
def test_a_wrong_record_is_refused(cubin: Cubin, change: dict[str, object], message: str) -> None:
    with pytest.raises(VerifyError) as error:
        check_launch_record(msgspec.structs.replace(cubin.record, **change), cubin.data)
    assert str(error.value) == message


def test_a_record_without_the_scratch_pointers_is_refused(cubin: Cubin) -> None:
    record = msgspec.structs.replace(cubin.record, arguments=cubin.record.arguments[:-2])
    with pytest.raises(VerifyError, match="takes parameters of"):
        check_launch_record(record, cubin.data)


def test_an_argument_of_another_size_is_refused(cubin: Cubin) -> None:
    first, *others = cubin.record.arguments
    number = msgspec.structs.replace(first, kind="i32", num_bytes=4)
    record = msgspec.structs.replace(cubin.record, arguments=(number, *others))
    with pytest.raises(VerifyError, match="takes parameters of"):
        check_launch_record(record, cubin.data)


def test_what_spills_more_than_its_budget_is_refused() -> None:
    source = next(KERNELS["rope_table"]()).source
    assert source.stack_bytes == 32
    with pytest.raises(
        VerifyError, match=r"rope_table for sm_90: 32 bytes of a thread's registers spilled, its budget is 0"
    ):
        build(dataclasses.replace(source, stack_bytes=0), "rope_table", "", "sm_90")


@pytest.mark.slow
@pytest.mark.parametrize("has_shared", [False, True])
def test_decode_attention_of_eight_heads_a_kv_head_keeps_to_its_registers(has_shared: bool) -> None:
    cells = TILES if has_shared else invariant_cells("causal", 0, 8192)
    shape = AttentionShape("bfloat16", 32, 4, 128, (5120, 4096), 48, 32, 128**-0.5, 0.0, "causal", 0, has_sinks=False)
    source = decode_attention(shape, 216, cells, has_shared)
    assert build(source, "decode_attention", "", "sm_80").record.resources["local_bytes"] == 0


def test_a_kernel_has_as_many_stages_as_the_chip_has_shared_memory_for() -> None:
    source = linear("bfloat16", "bfloat16", "tokens", 256, 1024, (1024, 256, 256), False, False, None, False)
    deep = dataclasses.replace(source, num_stages=5)
    assert build(deep, "linear", "", "sm_80").record.shared_bytes == 128 << 10
    message = "linear: 131072 bytes of shared memory a block, {} has 101376$"
    with pytest.raises(TooMuchSharedMemory, match=message.format("sm_86")):
        build(deep, "linear", "", "sm_86")
    with pytest.raises(TooMuchSharedMemory, match=message.format("PTX")):  # which those may have to run, too
        build(deep, "linear", "", "sm_80", assemble=False)
    assert build_fitting(deep, "linear", "", "sm_86").record.shared_bytes == 96 << 10


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_a_cubin_names_its_chip(arch: str) -> None:
    built = compiled(arch)
    assert read_entry(built.data, built.record.entry, "silu_mul").arch == arch


@pytest.mark.parametrize("data", [b"", b"not a cubin", b"\x7fELF\x02" + bytes(200)])
def test_what_is_no_cubin_is_refused(cubin: Cubin, data: bytes) -> None:
    with pytest.raises(VerifyError, match="not a CUDA ELF file"):
        check_launch_record(cubin.record, data)


def test_a_grid_is_no_python(cubin: Cubin) -> None:
    record = msgspec.structs.replace(cubin.record, grid=("__import__('os')", "1", "1"))
    with pytest.raises(VerifyError, match="a grid may hold"):
        grid_for(record, num_tokens=1)


@pytest.mark.parametrize(("arch", "waits"), [("sm_80", False), ("sm_90", True), ("sm_100", True)])
def test_a_kernel_waits_for_the_one_before_it(arch: str, waits: bool) -> None:
    """Before it reads anything, where the chip can launch it while that one still runs."""
    built = compiled(arch)
    assert built.record.dependent is waits
    body = built.ptx.decode().partition("// %bb.0:\n")[2].split()
    assert (body[:2] == ["griddepcontrol.launch_dependents;", "griddepcontrol.wait;"]) is waits
