"""Compile a Triton kernel ahead of time, for GPUs that this machine does not have.

The result is a cubin, what it takes to launch it without Triton, and what it costs a GPU (registers, shared memory,
spills). Triton is imported here, at compile time, and nowhere else.
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

from inferc.codegen.triton.aot.launch import Argument, LaunchRecord, check_launch_record
from inferc.codegen.triton.aot.occupancy import MULTIPROCESSORS, max_shared_bytes
from inferc.codegen.triton.aot.source import Source
from inferc.errors import UnsupportedError, VerifyError

DEPENDENT_SINCE = 90  # the first chip that has programmatic dependent launch
WAITS = (b"griddepcontrol.launch_dependents", b"griddepcontrol.wait")
FIRST_BLOCK = "// %bb.0:"  # of a kernel, in what LLVM prints
CUT_STACK_BYTES = 4096  # of a kernel that a chip has not the shared memory for
ARGUMENT_BYTES = {"i32": 4}  # a pointer, or 64 bits: 8
# Triton's entry points end with these two; a kernel that needs no scratch memory takes null.
SCRATCH = (Argument("global_scratch", "u64", 8), Argument("profile_scratch", "u64", 8))


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel, its launch record, and what it was assembled from, which the driver of a newer chip compiles."""

    data: bytes
    record: LaunchRecord
    ptx: bytes


def available() -> bool:
    """Whether this machine can compile Triton kernels."""
    return importlib.util.find_spec("triton") is not None


class TooMuchSharedMemory(VerifyError):
    """A kernel that takes more than a block can have."""


def build_fitting(source: Source, name: str, op: str, arch: str, *, assemble: bool = True) -> Cubin:
    """`build` with the most stages, up to those of the source, for which a block has shared memory."""
    try:
        return build(source, name, op, arch, assemble=assemble)
    except TooMuchSharedMemory:
        fewer = _with_fewer_stages(source)
        if fewer is None:
            raise
    return build_fitting(fewer, name, op, arch, assemble=assemble)


def _with_fewer_stages(source: Source) -> Source | None:
    """Of the whole kernel, or of the loop that a constant gives them to. What is not on its way to a product may spill."""
    source = replace(source, stack_bytes=max(source.stack_bytes, CUT_STACK_BYTES))
    if source.num_stages > 1:
        return replace(source, num_stages=source.num_stages - 1)
    if source.constants.get("STAGES", 1) > 1:
        return replace(source, constants={**source.constants, "STAGES": source.constants["STAGES"] - 1})
    return None


def build(source: Source, name: str, op: str, arch: str, *, assemble: bool = True) -> Cubin:
    """Compile `source` for `arch` ("sm_90"); without `assemble` to PTX alone.

    Raises VerifyError for a cubin that its launch record does not fit, or that spills more than `source` allows,
    TooMuchSharedMemory for what no block of `arch` can have, of PTX no block of any chip.
    """
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if not re.fullmatch(r"sm_\d+", arch):
        raise UnsupportedError(f"{name}: arch {arch!r} is not an NVIDIA one; expected for example sm_90")
    signature = {**source.signature, **dict.fromkeys(source.all_constants, "constexpr")}
    order = list(source.signature)
    attributes = {(order.index(argument),): [["tt.divisibility", 16]] for argument in source.aligned}
    number = int(arch.removeprefix("sm_"))
    dependent = number >= DEPENDENT_SINCE
    with knobs.compilation.scope(), knobs.runtime.scope():
        knobs.compilation.disable_line_info = True  # it holds the compiling machine's paths
        hooks = [*((_wait_first,) if dependent else ()), *(() if assemble else (_stop_at_ptx,))]

        def hook(_backend: Any, stages: dict[str, Any], *_: Any) -> None:
            for each in hooks:
                each(stages)

        knobs.runtime.add_stages_inspection_hook = hook
        compiled = triton.compile(
            ASTSource(source.function, signature, source.all_constants, attributes),
            target=GPUTarget("cuda", number, 32),
            # launch_pdl and ptx_options change no code here, but the key under which Triton keeps it.
            options={
                "num_warps": source.num_warps,
                "num_stages": source.num_stages,
                "launch_pdl": dependent,
                "ptx_options": None if assemble else "-O1",
            },
        )
    ptx = compiled.asm["ptx"].encode()
    if dependent and not all(each in ptx for each in WAITS):
        raise VerifyError(
            f"{name} for {arch} does not wait for the kernel before it: empty Triton's cache and try again"
        )
    data: bytes = compiled.asm["cubin"] if assemble else b""
    metadata = compiled.metadata
    arguments = [
        Argument(argument, kind, ARGUMENT_BYTES.get(kind, 8), 16 if argument in source.aligned else 1)
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
    # PTX is for other chips than the one that it was made for.
    limit = max_shared_bytes(arch) if assemble else min(map(max_shared_bytes, MULTIPROCESSORS))
    if record.block_shared_bytes > limit:
        found = f"{record.block_shared_bytes} bytes of shared memory a block, {arch if assemble else 'PTX'} has {limit}"
        raise TooMuchSharedMemory(f"{name}: {found}")
    if not assemble:
        return Cubin(data, record, ptx)
    check_launch_record(record, data)
    if (spilled := record.resources["stack_bytes"] + record.resources["local_bytes"]) > source.stack_bytes:
        raise VerifyError(
            f"{name} for {arch}: {spilled} bytes of a thread's registers spilled, its budget is {source.stack_bytes}"
        )
    return Cubin(data, record, ptx)


def _wait_first(stages: dict[str, Any]) -> None:
    """Have the kernel begin by letting the next one be launched, and by waiting for the one before it to be done.

    So the next kernel's blocks are on the multiprocessors when this one's last block ends (programmatic dependent launch).
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
    """The ptxas that assembles for a chip, and its version, which is that of the CUDA that a driver must know."""
    from triton.backends.nvidia.compiler import get_ptxas

    return f"ptxas {get_ptxas(int(arch.removeprefix('sm_'))).version}"


def read_resources(cubin: bytes, entry: str) -> dict[str, int]:
    """Registers per thread, and bytes of stack, static shared and local memory, as the driver will see them.

    Local memory and stack are what registers spilled to, which is slow.
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
