"""The binding of NVIDIA's cuBLASLt for matrix products, used where it measured faster than the compiled kernel.

It uses ctypes only. The library is not part of an artifact: it is searched for on the machine that serves the artifact,
and the compiled kernel computes whatever the library cannot. The library's algorithm for a product is chosen while the
artifact is loaded, once for all row counts up to each power of two, so a step only launches it. The library works in a
workspace allocated beforehand, so its launches can be captured in a CUDA graph.

The library's matrices are column-major: an output [rows, n] here is [n, rows] there, the product of the transposed
weight [k, n] and of x [k, rows]. Source: NVIDIA's documentation of cuBLAS, "Using the cuBLASLt API", and its
cublasLt.h.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferc.arena import KERNEL_ALIGNMENT
from inferc.errors import InfercError, UnsupportedError
from inferc.manifest_types import RecordLibrary, RecordProduct

log = logging.getLogger(__name__)

# The pip packages by major version, for the versions that have the interface bound here; the preferred one first.
PACKAGES = {13: "nvidia-cublas", 12: "nvidia-cublas-cu12"}
FOLDERS = ("nvidia/cu13/lib", "nvidia/cublas/lib")  # where these packages put the library in site-packages
WORKSPACE_BYTES = 32 << 20  # NVIDIA's recommendation from Hopper on, used for all chips
MAX_ALGORITHMS = 8  # how many algorithms the heuristic is asked for, best first

TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}  # cudaDataType
COMPUTE_32F = 68  # cublasComputeType_t: sums in float32; float32 inputs are not rounded to TF32
TRANSPOSED = 1
DESC_TRANSA, DESC_EPILOGUE, DESC_BIAS_POINTER = 3, 7, 8  # cublasLtMatmulDescAttributes_t
EPILOGUE_BIAS = 4
LAYOUT_COLS = 3
PREFER_MAX_WORKSPACE_BYTES = 1
PREFER_MIN_ALIGNMENTS = (5, 6, 7, 8)  # the attributes for A, B, C and D

Handle = c_void_p
FUNCTIONS: dict[str, list[Any]] = {
    "cublasLtGetVersion": [],
    "cublasLtGetStatusName": [c_int],
    "cublasLtGetStatusString": [c_int],
    "cublasLtCreate": [POINTER(Handle)],
    "cublasLtDestroy": [Handle],
    "cublasLtMatmulDescCreate": [POINTER(Handle), c_int, c_int],
    "cublasLtMatmulDescSetAttribute": [Handle, c_int, c_void_p, c_size_t],
    "cublasLtMatmulDescDestroy": [Handle],
    "cublasLtMatrixLayoutCreate": [POINTER(Handle), c_int, c_uint64, c_uint64, c_int64],
    "cublasLtMatrixLayoutSetAttribute": [Handle, c_int, c_void_p, c_size_t],
    "cublasLtMatrixLayoutDestroy": [Handle],
    "cublasLtMatmulPreferenceCreate": [POINTER(Handle)],
    "cublasLtMatmulPreferenceSetAttribute": [Handle, c_int, c_void_p, c_size_t],
    "cublasLtMatmulPreferenceDestroy": [Handle],
    "cublasLtMatmulAlgoGetHeuristic": [*[Handle] * 7, c_int, c_void_p, POINTER(c_int)],
    "cublasLtMatmulAlgoCheck": [*[Handle] * 6, c_void_p, c_void_p],
    "cublasLtMatmul": [
        Handle,
        Handle,  # the descriptor of the product
        c_void_p,  # alpha
        c_void_p,  # A
        Handle,
        c_void_p,  # B
        Handle,
        c_void_p,  # beta
        c_void_p,  # C
        Handle,
        c_void_p,  # D
        Handle,
        c_void_p,  # the algorithm
        c_void_p,  # the workspace
        c_size_t,
        c_void_p,  # the stream
    ],
}
RESULTS = {"cublasLtGetVersion": c_size_t, "cublasLtGetStatusName": c_char_p, "cublasLtGetStatusString": c_char_p}


class Algorithm(ctypes.Structure):
    """The C struct cublasLtMatmulAlgo_t."""

    _fields_ = [("data", c_uint64 * 8)]


class Heuristic(ctypes.Structure):
    """The C struct cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", Algorithm),
        ("workspace_bytes", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


def open_library(newest: int) -> Any:
    """Open the library of CUDA `newest` (a major version), or of an older one, and type its functions.

    Raises UnsupportedError if there is none.
    """
    for path in _paths(newest):
        try:
            library = ctypes.CDLL(path)
            for name, arguments in FUNCTIONS.items():
                function = getattr(library, name)
                function.argtypes, function.restype = arguments, RESULTS.get(name, c_int)
        except (OSError, AttributeError) as error:
            log.debug("%s: %s", path, error)
            continue
        return library
    majors = [major for major in PACKAGES if major <= newest]
    if not majors:
        raise UnsupportedError(f"no cuBLASLt runs with a driver of CUDA {newest}")
    names = " and no ".join(f"libcublasLt.so.{major}" for major in majors)
    raise UnsupportedError(f"no {names} on this machine; pip install {PACKAGES[majors[0]]}")


def _paths(newest: int) -> Iterator[str]:
    """Yield where to look for the library: the system's library paths, then pip's packages."""
    for major in PACKAGES:
        if major <= newest:
            name = f"libcublasLt.so.{major}"
            yield name
            places = (Path(each) / folder / name for each in sys.path for folder in FOLDERS)
            yield from (str(path) for path in places if path.exists())


class CublasLt:
    """The cuBLASLt library, opened for the GPU that the calling thread has entered.

    library: what `open_library` returns, or a test's stand-in; allocate: takes a number of bytes and returns the
    address of device memory. Raises UnsupportedError for an unknown version, and if the library does not start.
    """

    def __init__(self, library: Any, allocate: Callable[[int], int]) -> None:
        self._library = library
        number: int = library.cublasLtGetVersion()
        self.version = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
        if number // 10000 not in PACKAGES:
            raise UnsupportedError(f"cuBLASLt {self.version} is not known: expected {' or '.join(map(str, PACKAGES))}")
        self._products: dict[RecordProduct, LibraryProduct] = {}
        self.handle = Handle()
        try:
            self.call("cublasLtCreate", byref(self.handle))
        except InfercError as error:
            raise UnsupportedError(f"cuBLASLt {self.version} does not start: {error}") from None
        self.workspace = allocate(WORKSPACE_BYTES)

    def bind(self, choice: RecordLibrary, values: Mapping[str, int]) -> BoundProduct:
        """Bind a product to its arguments. values: device addresses by argument of the kernel."""
        if choice.product not in self._products:
            self._products[choice.product] = LibraryProduct(self, choice.product)
        return BoundProduct(self._products[choice.product], choice.from_rows, values)

    def close(self) -> None:
        for product in self._products.values():
            product.close()
        self._products = {}
        self.call("cublasLtDestroy", self.handle)

    def call(self, name: str, *args: Any) -> None:
        """Call a function of the library. Raises InfercError with the library's message."""
        status: int = getattr(self._library, name)(*args)
        if status != 0:
            told, text = (
                getattr(self._library, f"cublasLtGetStatus{what}")(status) or b"?" for what in ("Name", "String")
            )
            raise InfercError(f"{name} failed with {told.decode()}: {text.decode()}")

    def create(self, what: str, *args: Any) -> Handle:
        """Create an object: a "MatmulDesc", a "MatrixLayout" or a "MatmulPreference"."""
        made = Handle()
        self.call(f"cublasLt{what}Create", byref(made), *args)
        return made

    def set(self, what: str, of: Handle, attribute: int, value: Any) -> None:
        """Set an attribute of an object. value: an instance of the attribute's ctypes type."""
        self.call(f"cublasLt{what}SetAttribute", of, attribute, byref(value), ctypes.sizeof(value))


class LibraryProduct:
    """A product of one shape, for the numbers of rows that it was prepared for."""

    def __init__(self, cublaslt: CublasLt, product: RecordProduct) -> None:
        self._cublaslt, self._product = cublaslt, product
        of, self._rows = product, 1
        dtype, out_dtype = TYPES[of.dtype], TYPES[of.out_dtype]
        self._desc = cublaslt.create("MatmulDesc", COMPUTE_32F, TYPES["float32"])
        cublaslt.set("MatmulDesc", self._desc, DESC_TRANSA, c_int32(TRANSPOSED))
        if of.has_bias:
            cublaslt.set("MatmulDesc", self._desc, DESC_EPILOGUE, c_uint32(EPILOGUE_BIAS))
        self._weight = cublaslt.create("MatrixLayout", dtype, of.k, of.n, of.k)
        self._x = cublaslt.create("MatrixLayout", dtype, of.k, self._rows, of.x_stride)
        self._out = cublaslt.create("MatrixLayout", out_dtype, of.n, self._rows, of.out_stride)
        self._added = self._out
        if of.residual_stride is not None:
            self._added = cublaslt.create("MatrixLayout", out_dtype, of.n, self._rows, of.residual_stride)
        self._one, self._added_times = c_float(1.0), c_float(0.0 if of.residual_stride is None else 1.0)
        self._algorithms: dict[int, Algorithm | None] = {}  # key: the largest number of rows

    def takes(self, rows: int) -> bool:
        """Return whether the product was prepared for this number of rows, and the library can compute it."""
        return self._algorithms.get(power_of_two(rows)) is not None

    def prepare(self, stream: c_void_p, fewest: int, most: int, values: Mapping[str, int]) -> None:
        """Have the library choose an algorithm for `fewest` to `most` rows, and run it once, which loads its code."""
        top = power_of_two(fewest)
        while fewest <= most and top <= power_of_two(most):
            if top not in self._algorithms:
                self._algorithms[top] = None
                try:
                    self._algorithms[top] = self._choose(top // 2 + 1, top, values)
                    self.launch(stream, min(top, most), values)
                except InfercError as error:
                    self._algorithms[top] = None
                    shape = f"{top} x {self._product.n} x {self._product.k}"
                    log.warning("the kernel computes products of %s instead of cuBLASLt: %s", shape, error)
            top *= 2

    def launch(self, stream: c_void_p, rows: int, values: Mapping[str, int]) -> None:
        """Launch the product on the stream for a number of rows that `takes` accepts."""
        self._set(rows, values)
        out = values["out_ptr"]
        added = out if self._product.residual_stride is None else values["residual_ptr"]
        algorithm = self._algorithms[power_of_two(rows)]
        assert algorithm is not None
        self._cublaslt.call(
            "cublasLtMatmul",
            self._cublaslt.handle,
            self._desc,
            byref(self._one),
            values["weight_ptr"],
            self._weight,
            values["x_ptr"],
            self._x,
            byref(self._added_times),
            added,
            self._added,
            out,
            self._out,
            byref(algorithm),
            self._cublaslt.workspace,
            WORKSPACE_BYTES,
            stream,
        )

    def close(self) -> None:
        for layout in {each.value: each for each in (self._weight, self._x, self._added, self._out)}.values():
            self._cublaslt.call("cublasLtMatrixLayoutDestroy", layout)
        self._cublaslt.call("cublasLtMatmulDescDestroy", self._desc)

    def _set(self, rows: int, values: Mapping[str, int]) -> None:
        """Set the descriptors for a call.

        The library reads them during the call, so they may differ from call to call.
        """
        if rows != self._rows:
            for layout in {each.value: each for each in (self._x, self._added, self._out)}.values():
                self._cublaslt.set("MatrixLayout", layout, LAYOUT_COLS, c_uint64(rows))
            self._rows = rows
        if self._product.has_bias:
            self._cublaslt.set("MatmulDesc", self._desc, DESC_BIAS_POINTER, c_uint64(values["bias_ptr"]))

    def _choose(self, fewest: int, most: int, values: Mapping[str, int]) -> Algorithm:
        """Return the first algorithm suggested for `most` rows that can also compute `fewest`."""
        cublaslt = self._cublaslt
        self._set(most, values)
        described = (cublaslt.handle, self._desc, self._weight, self._x, self._added, self._out)
        preference = cublaslt.create("MatmulPreference")
        suggested, count = (Heuristic * MAX_ALGORITHMS)(), c_int()
        try:
            cublaslt.set("MatmulPreference", preference, PREFER_MAX_WORKSPACE_BYTES, c_uint64(WORKSPACE_BYTES))
            for attribute in PREFER_MIN_ALIGNMENTS:
                cublaslt.set("MatmulPreference", preference, attribute, c_uint32(KERNEL_ALIGNMENT))
            cublaslt.call(
                "cublasLtMatmulAlgoGetHeuristic", *described, preference, MAX_ALGORITHMS, suggested, byref(count)
            )
        finally:
            cublaslt.call("cublasLtMatmulPreferenceDestroy", preference)
        self._set(fewest, values)
        reason = "it knows no way"
        for each in suggested[: count.value]:
            checked = Heuristic()
            try:
                cublaslt.call("cublasLtMatmulAlgoCheck", *described, byref(each.algorithm), byref(checked))
            except InfercError as error:
                reason = str(error)
                continue
            if each.status == 0 and max(each.workspace_bytes, checked.workspace_bytes) <= WORKSPACE_BYTES:
                return Algorithm.from_buffer_copy(each.algorithm)
        raise UnsupportedError(reason)


@dataclass(frozen=True)
class BoundProduct:
    """A product with its arguments."""

    product: LibraryProduct
    from_rows: int
    values: Mapping[str, int]

    def prepare(self, stream: c_void_p, most: int) -> None:
        """Prepare the product for up to `most` rows."""
        self.product.prepare(stream, self.from_rows, most, self.values)

    def takes(self, rows: int) -> bool:
        """Return whether the library, rather than the kernel, computes this number of rows."""
        return rows >= self.from_rows and self.product.takes(rows)

    def launch(self, stream: c_void_p, rows: int) -> None:
        self.product.launch(stream, rows, self.values)


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()
