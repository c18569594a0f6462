"""The ahead-of-time compiler of Triton kernels, for GPUs that this machine does not have.

The result is a cubin, the record that is needed to launch it without Triton, and what it costs a GPU (registers, shared
memory, spills). Triton is imported here, at compile time, and nowhere else.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from inferc.codegen.triton.aot.launch import check_launch_record
from inferc.codegen.triton.aot.occupancy import MULTIPROCESSORS, max_shared_bytes
from inferc.codegen.triton.aot.source import Source
from inferc.errors import UnsupportedError, VerifyError
from inferc.manifest_types import LaunchRecord, RecordArgument

DEPENDENT_SINCE = 90  # the first chip that has programmatic dependent launch
WAITS = (b"griddepcontrol.launch_dependents", b"griddepcontrol.wait")
FIRST_BLOCK = "// %bb.0:"  # how LLVM labels the first basic block of a kernel
CUT_STACK_BYTES = 4096  # spill budget of a kernel whose stages were cut because a chip has too little shared memory
ARGUMENT_BYTES = {"i32": 4}  # pointers and 64-bit integers, which are not listed, take 8
# The last two parameters of every Triton entry point; they are null for a kernel that needs no scratch memory.
SCRATCH = (RecordArgument("global_scratch", "u64", 8), RecordArgument("profile_scratch", "u64", 8))


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel with its launch record and its PTX.

    The PTX is what the cubin was assembled from. The driver of a newer chip compiles it.
    """

    data: bytes
    record: LaunchRecord
    ptx: bytes


def available() -> bool:
    """Return whether this machine can compile Triton kernels."""
    return importlib.util.find_spec("triton") is not None


class TooMuchSharedMemory(VerifyError):
    """The error of a kernel that needs more shared memory than a block can have."""


def build_fitting(source: Source, name: str, op: str, arch: str, *, assemble: bool = True) -> Cubin:
    """Compile like `build`, with as many pipeline stages as a block has shared memory for.

    The source's number of stages is the most that is tried.
    """
    try:
        return build(source, name, op, arch, assemble=assemble)
    except TooMuchSharedMemory:
        fewer = _with_fewer_stages(source)
        if fewer is None:
            raise
    return build_fitting(fewer, name, op, arch, assemble=assemble)


def _with_fewer_stages(source: Source) -> Source | None:
    """Return the source with one pipeline stage less, or None if it has only one.

    The stages are those of the whole kernel, or of the loop that the constant STAGES is for. With fewer stages, values
    that are not in flight to a product may spill.
    """
    source = replace(source, stack_bytes=max(source.stack_bytes, CUT_STACK_BYTES))
    if source.num_stages > 1:
        return replace(source, num_stages=source.num_stages - 1)
    if source.constants.get("STAGES", 1) > 1:
        return replace(source, constants={**source.constants, "STAGES": source.constants["STAGES"] - 1})
    return None


def build(source: Source, name: str, op: str, arch: str, *, assemble: bool = True) -> Cubin:
    """Compile `source` for `arch` (for example "sm_90"); without `assemble` to PTX only.

    Raises VerifyError if the cubin does not match its launch record, or spills more than `source` allows. Raises
    TooMuchSharedMemory if the kernel needs more shared memory than a block of `arch` can have; for PTX the limit is
    that of the chip with the least.
    """
    import triton

    if not re.fullmatch(r"sm_\d+", arch):
        raise UnsupportedError(f"{name}: arch {arch!r} is not an NVIDIA one; expected for example sm_90")
    dependent = int(arch.removeprefix("sm_")) >= DEPENDENT_SINCE
    compiled = _compile(source, arch, dependent, assemble)
    ptx = compiled.asm["ptx"].encode()
    if dependent and not all(each in ptx for each in WAITS):
        raise VerifyError(
            f"{name} for {arch} does not wait for the kernel before it: empty Triton's cache and try again"
        )
    data: bytes = compiled.asm["cubin"] if assemble else b""
    metadata = compiled.metadata
    arguments = [
        RecordArgument(argument, kind, ARGUMENT_BYTES.get(kind, 8), 16 if argument in source.aligned else 1)
        for argument, kind in source.signature.items()
    ]
    record = LaunchRecord(
        name=name,
        op=op,
        arch=arch,
        entry=metadata.name,
        grid=source.grid,
        num_warps=metadata.num_warps,
        shared_bytes=metadata.shared,
        global_scratch_bytes=metadata.global_scratch_size,
        arguments=(*arguments, *SCRATCH),
        constants=dict(source.constants),
        resources=read_resources(data, metadata.name) if assemble else {},
        compiler=f"triton {triton.__version__}, {_assembler(arch)}",
        dependent=dependent,
    )
    _check_shared_memory(record, arch, assemble)
    if not assemble:
        return Cubin(data, record, ptx)
    check_launch_record(record, data)
    if (spilled := record.resources["stack_bytes"] + record.resources["local_bytes"]) > source.stack_bytes:
        raise VerifyError(
            f"{name} for {arch}: {spilled} bytes of a thread's registers spilled, its budget is {source.stack_bytes}"
        )
    return Cubin(data, record, ptx)


def _compile(source: Source, arch: str, dependent: bool, assemble: bool) -> Any:
    """Have Triton compile `source`, to PTX only unless `assemble`; dependent: its launch waits for the one before."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {**source.signature, **dict.fromkeys(source.all_constants, "constexpr")}
    order = list(source.signature)
    attributes = {(order.index(argument),): [["tt.divisibility", 16]] for argument in source.aligned}
    number = int(arch.removeprefix("sm_"))
    with knobs.compilation.scope(), knobs.runtime.scope():
        knobs.compilation.disable_line_info = True  # line info holds paths of the compiling machine
        hooks = [*((_wait_first,) if dependent else ()), *(() if assemble else (_stop_at_ptx,))]

        def hook(_backend: Any, stages: dict[str, Any], *_: Any) -> None:
            for each in hooks:
                each(stages)

        knobs.runtime.add_stages_inspection_hook = hook
        return triton.compile(
            ASTSource(source.function, signature, source.all_constants, attributes),
            target=GPUTarget("cuda", number, 32),
            # launch_pdl and ptx_options do not change the code here. They change the key of Triton's cache.
            options={
                "num_warps": source.num_warps,
                "num_stages": source.num_stages,
                "launch_pdl": dependent,
                "ptx_options": None if assemble else "-O1",
            },
        )


def _check_shared_memory(record: LaunchRecord, arch: str, assemble: bool) -> None:
    """Raise TooMuchSharedMemory for a kernel that needs more than a block of the chip can have."""
    # PTX runs on other chips than the one that it is compiled for, and must fit all of them.
    limit = max_shared_bytes(arch) if assemble else min(map(max_shared_bytes, MULTIPROCESSORS))
    if record.block_shared_bytes > limit:
        found = f"{record.block_shared_bytes} bytes of shared memory a block, {arch if assemble else 'PTX'} has {limit}"
        raise TooMuchSharedMemory(f"{record.name}: {found}")


def _wait_first(stages: dict[str, Any]) -> None:
    """Make the kernel first allow the next kernel's launch, and then wait for the kernel before it to end.

    The next kernel's blocks are then already on the multiprocessors when this kernel's last block ends (programmatic
    dependent launch).
    """
    make = stages["ptx"]

    def make_ptx(source: Any, metadata: Any) -> str:
        text: str = make(source, metadata)
        begin = f"{FIRST_BLOCK}\n"
        assert text.count(begin) == 1, "the kernel's first block is not found"
        return text.replace(begin, f"{begin}\tgriddepcontrol.launch_dependents;\n\tgriddepcontrol.wait;\n")

    stages["ptx"] = make_ptx


def _stop_at_ptx(stages: dict[str, Any]) -> None:
    stages["cubin"] = lambda source, _: source.encode()


@lru_cache
def _assembler(arch: str) -> str:
    """Return the name and version of the ptxas that assembles for a chip.

    The version is that of the CUDA release that a driver must support.
    """
    from triton.backends.nvidia.compiler import get_ptxas

    return f"ptxas {get_ptxas(int(arch.removeprefix('sm_'))).version}"


def read_resources(cubin: bytes, entry: str) -> dict[str, int]:
    """Return registers per thread, and bytes of stack, static shared and local memory, as the driver will see them.

    Registers spill to local memory and to the stack, which are slow.
    """
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    match = re.search(rf"Function {re.escape(entry)}:\s*\n(.*)", text)
    if match is None:
        raise UnsupportedError(f"cuobjdump reports no resources of {entry}; it printed: {' '.join(text.split())}")
    found = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", match[1])}
    return {
        "registers": found["REG"],
        "stack_bytes": found["STACK"],
        "static_shared_bytes": found["SHARED"],
        "local_bytes": found["LOCAL"],
    }
