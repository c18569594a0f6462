"""The header kernels as Python functions over torch tensors: one library for each instruction set this machine runs."""

from __future__ import annotations

import ctypes
import fcntl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferc.codegen.cpp.build import Compiler, Unit, build
from inferc.codegen.cpp.calls.moe import moe_work_bytes
from inferc.codegen.cpp.unit import HEADERS
from inferc.ir import weights as weight_lib
from inferc.ir.ops.experts import ACTIVATIONS
from inferc.ir.ops.quantize import int4_group
from inferc.runtime.runners.cpu.abi import detect_isa
from inferc.system import env as debug

FOLDER = Path(__file__).parents[1] / "codegen" / "cpp" / "units"
COMMON = FOLDER / "units.h"
UNITS = [Unit(path.read_text()) for path in sorted(FOLDER.glob("*.cpp"))]
ISAS = detect_isa()
EMULATED = "amx-emulated"  # the kernels of amx, with tiles in plain C++: runs wherever avx512 does
TILES = FOLDER / "amx_emulated.h"
DTYPES = (torch.float32, torch.bfloat16)
# Largest difference to the reference, relative to the largest magnitude of the result. The float32 kernels add in
# another order than torch; bfloat16 results may land on the neighbouring number.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1.0 / 128}
LAYOUTS = {
    torch.float32: "panel16_k1",
    torch.bfloat16: "panel16_k2",
    torch.int8: "panel16_k4",
    torch.uint8: "panel16_k4",
}


def build_emulated(
    units: Sequence[Unit],
    headers: Sequence[str],
    own_headers: Mapping[str, str] = MappingProxyType({}),
    common: str = "",
) -> Path:
    """`units` for amx, with tiles that need no AMX."""
    own = {**own_headers, TILES.name: TILES.read_text()}
    # At -O1, as emulated tiles are no code that an artifact holds, and take twice as long to compile at -O3.
    emulated = [Unit(unit.source, (*unit.flags, "-DINFERC_AMX_EMULATED", "-O1")) for unit in units]
    return build(emulated, headers, ("avx512",), own_headers=own, common=common)["avx512"]


def build_kernels(isa: str) -> Path:
    """The library of all kernels as C functions. Processes that want the same one wait for who builds it."""
    with building(isa):
        if isa == EMULATED:
            return build_emulated(UNITS, HEADERS, {COMMON.name: COMMON.read_text()}, common=COMMON.name)
        return build_units(UNITS, isa)


def build_units(units: Sequence[Unit], isa: str, compiler: Compiler | None = None) -> Path:
    own = {COMMON.name: COMMON.read_text()}
    return build(units, HEADERS, (isa,), own_headers=own, compiler=compiler, common=COMMON.name)[isa]


@contextmanager
def building(isa: str) -> Iterator[None]:
    """Let one process at a time build, with all cores; the others then find the result in the cache."""
    cache = debug.cache_dir()
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / f"tests-{isa}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Kernels:
    """Calls with tensors as pointers, ints as int64 and floats as float32."""

    def __init__(self, isa: str, num_threads: int = 2) -> None:
        self.library = ctypes.CDLL(str(build_kernels(isa)))
        self.library.threads_open.restype = ctypes.c_void_p
        self.library.test_uniform.restype = ctypes.c_double
        self.library.test_barriers.restype = self.library.test_each.restype = ctypes.c_int64
        self.isa, self.num_threads = isa, num_threads
        self.threads = ctypes.c_void_p(self.library.threads_open(num_threads))

    def close(self) -> None:
        self.library.threads_close(self.threads)

    def __call__(self, name: str, *args: Any) -> Any:
        return getattr(self.library, name)(*(_convert(arg) for arg in args))

    def address(self, held: NDArray[Any] | ctypes.Structure) -> int:
        """Return the address of an array or struct that a struct points to, for the next call."""
        return ctypes.addressof(held) if isinstance(held, ctypes.Structure) else int(held.ctypes.data)

    def run(self, name: str, dtype: torch.dtype, *args: Any) -> None:
        """A kernel that takes the threads and the dtype first."""
        self(name, self.threads, DTYPES.index(dtype), *args)


def _convert(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return ctypes.c_void_p(arg.data_ptr())
    if isinstance(arg, np.ndarray):
        return ctypes.c_void_p(arg.ctypes.data)
    if isinstance(arg, ctypes.Structure):
        return ctypes.byref(arg)
    if isinstance(arg, int):
        return ctypes.c_int64(arg)
    if isinstance(arg, float):
        return ctypes.c_float(arg)
    return arg


def packed(weight: Tensor) -> Tensor:
    """A weight in the layout that kernels read."""
    return weight_lib.LAYOUTS[LAYOUTS[weight.dtype]].pack(weight)


def group_panels(scales: Tensor) -> Tensor:
    """The integer scales of groups, [..., n, groups], likewise."""
    return weight_lib.LAYOUTS["panel16_k1"].pack(scales)


def moe_experts(kernels: Kernels, **given: Any) -> Tensor:
    """`inferc.moe_experts` by the kernel, of the op's arguments by name; scratch is as large as in compiled code."""
    op = torch.ops.inferc.moe_experts.default
    values: dict[str, Any] = {each.name: given.get(each.name, each.default_value) for each in op._schema.arguments}
    x, ids, of_groups = values["x"], values["expert_ids"], values["gate_up_group_scale"]
    (experts, both, _), (rows, hidden), top_k = values["gate_up"].shape, x.shape, ids.shape[1]
    dtype = values["dtype"] or x.dtype
    out = torch.full((rows, hidden), float("nan"), dtype=dtype)
    per_row, besides = moe_work_bytes(_node(op, values, out))
    work = torch.full((per_row * rows + besides,), 255, dtype=torch.uint8)
    group = 0 if of_groups is None else int4_group(values["gate_up"], of_groups)
    group_scales = [None if each is None else group_panels(each) for each in (of_groups, values["down_group_scale"])]
    kernels.run(
        "test_moe_experts",
        dtype,
        x,
        values["x_scale"],
        ids,
        values["expert_weights"],
        packed(values["gate_up"]),
        packed(values["down"]),
        values["gate_up_bias"],
        values["down_bias"],
        values["gate_up_scale"],
        values["down_scale"],
        *group_scales,
        group,
        ACTIVATIONS.index(values["activation"]),
        values["alpha"],
        values["limit"],
        values["scale_input"],
        rows,
        top_k,
        experts,
        hidden,
        both // 2,
        out,
        work,
    )
    return out


def part_of(given: dict[str, Any], first: int, end: int) -> dict[str, Any]:
    """Rows [first, end) of the tensors among arguments."""
    return {name: each[first:end] if isinstance(each, Tensor) else each for name, each in given.items()}


def _node(op: Any, values: dict[str, Any], out: Tensor) -> torch.fx.Node:
    """A call of `op` as a program holds it, with the results' types."""
    graph = torch.fx.Graph()
    args = {name: graph.placeholder(name) if isinstance(each, Tensor) else each for name, each in values.items()}
    for name, arg in args.items():
        if isinstance(arg, torch.fx.Node):
            arg.meta["val"] = values[name]
    node = graph.call_function(op, kwargs=args)
    node.meta["val"] = out
    return node


def nan(*sizes: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor of NaN, for a kernel to write its result over."""
    return torch.full(sizes, float("nan"), dtype=dtype)


def assert_near(found: Tensor, expected: Tensor, factor: float = 1.0) -> None:
    """Within the table's tolerance; NaN anywhere fails."""
    tolerance = TOLERANCE[found.dtype] * factor
    found, expected = found.float(), expected.float()
    assert torch.isfinite(found).all()
    scale = max(1e-6, float(expected.abs().max()))
    error = float((found - expected).abs().max()) / scale
    assert error <= tolerance, f"relative error {error:.2e}, allowed {tolerance:.2e}"
