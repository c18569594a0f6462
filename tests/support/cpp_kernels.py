"""The header kernels as Python functions over torch tensors: one library for each instruction set this machine runs."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from inferc import weights as weight_lib
from inferc.codegen.cpp.build import build
from inferc.codegen.cpp.emit import HEADERS
from inferc.runtime.abi import detect_isa

UNIT = Path(__file__).parents[1] / "codegen" / "cpp" / "kernels_unit.cpp"
ISAS = detect_isa()
EMULATED = "amx-emulated"  # the kernels of amx, with tiles in plain C++: runs wherever avx512 does
TILES = UNIT.parent / "amx_emulated.h"
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


def build_emulated(source: str, headers: Sequence[str], own_headers: Mapping[str, str] = MappingProxyType({})) -> Path:
    """`source` for amx, with tiles that need no AMX."""
    own = {**own_headers, TILES.name: TILES.read_text()}
    return build("#define INFERC_AMX_EMULATED\n" + source, headers, ("avx512",), own_headers=own)["avx512"]


class Kernels:
    """Calls with tensors as pointers, ints as int64 and floats as float32."""

    def __init__(self, isa: str, num_threads: int = 2) -> None:
        headers = [name for name in HEADERS if name not in ("step.h", "collectives.h", "entry.h")]
        source = UNIT.read_text()
        library = build_emulated(source, headers) if isa == EMULATED else build(source, headers, (isa,))[isa]
        self.library = ctypes.CDLL(str(library))
        self.library.threads_open.restype = ctypes.c_void_p
        self.library.test_uniform.restype = ctypes.c_double
        self.library.test_barriers.restype = self.library.test_each.restype = ctypes.c_int64
        self.num_threads = num_threads
        self.threads = ctypes.c_void_p(self.library.threads_open(num_threads))

    def close(self) -> None:
        self.library.threads_close(self.threads)

    def __call__(self, name: str, *args: Any) -> Any:
        return getattr(self.library, name)(*(_convert(arg) for arg in args))

    def run(self, name: str, dtype: torch.dtype, *args: Any) -> None:
        """A kernel that takes the threads and the dtype first."""
        self(name, self.threads, DTYPES.index(dtype), *args)


def _convert(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return ctypes.c_void_p(arg.data_ptr())
    if isinstance(arg, int):
        return ctypes.c_int64(arg)
    if isinstance(arg, float):
        return ctypes.c_float(arg)
    return arg


def packed(weight: Tensor) -> Tensor:
    """A weight in the layout that kernels read."""
    return weight_lib.LAYOUTS[LAYOUTS[weight.dtype]].pack(weight)


def assert_near(found: Tensor, expected: Tensor, factor: float = 1.0) -> None:
    """Within the table's tolerance; NaN anywhere fails."""
    tolerance = TOLERANCE[found.dtype] * factor
    found, expected = found.float(), expected.float()
    assert torch.isfinite(found).all()
    scale = max(1e-6, float(expected.abs().max()))
    error = float((found - expected).abs().max()) / scale
    assert error <= tolerance, f"relative error {error:.2e}, allowed {tolerance:.2e}"
