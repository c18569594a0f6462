"""The binding of the NVIDIA driver's API: memory, copies, kernels and graphs of one GPU, through ctypes only.

It needs no CUDA toolkit, torch or Triton. A `Driver` works in the device's primary context, which torch uses too, so
their pointers are interchangeable. Every thread that calls a driver must have entered it (`enter`). No call waits
unless its docstring says so: a kernel's error is reported by the next call that waits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ulonglong, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferc.codegen.triton.aot.launch import grid_for
from inferc.errors import InfercError, UnsupportedError
from inferc.manifest_types import LaunchRecord
from inferc.system.gpu import COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR, LIBRARY

MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
UNASKED_SHARED_BYTES = 48 << 10  # a block may use this much shared memory without opting in
MULTIPROCESSORS = 16
MAX_SHARED_BYTES_OPTIN = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
CAPTURE_THREAD_LOCAL = 1  # calls of other threads do not invalidate this thread's capture
STREAM_NON_BLOCKING = 1
EVENT_NO_TIMING = 2
OUT_OF_MEMORY, NO_BINARY, UNSUPPORTED_PTX = 2, 209, 222
PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
DEPENDENT_SINCE = (12, 3)  # the first CUDA version with programmatic dependent launch in graphs
NAME_BYTES = 256

Pointer = c_uint64
FUNCTIONS: dict[str, list[Any]] = {
    "cuInit": [c_uint],
    "cuDriverGetVersion": [POINTER(c_int)],
    "cuDeviceGetCount": [POINTER(c_int)],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDeviceGetName": [c_char_p, c_int, c_int],
    "cuDeviceGetAttribute": [POINTER(c_int), c_int, c_int],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuDevicePrimaryCtxRelease_v2": [c_int],
    "cuCtxSetCurrent": [c_void_p],
    "cuMemGetInfo_v2": [POINTER(c_size_t), POINTER(c_size_t)],
    "cuMemAlloc_v2": [POINTER(Pointer), c_size_t],
    "cuMemFree_v2": [Pointer],
    "cuMemHostAlloc": [POINTER(c_void_p), c_size_t, c_uint],
    "cuMemFreeHost": [c_void_p],
    "cuMemcpyHtoDAsync_v2": [Pointer, c_void_p, c_size_t, c_void_p],
    "cuMemcpyDtoHAsync_v2": [c_void_p, Pointer, c_size_t, c_void_p],
    "cuMemcpyDtoDAsync_v2": [Pointer, Pointer, c_size_t, c_void_p],
    "cuMemcpyDtoH_v2": [c_void_p, Pointer, c_size_t],
    "cuMemsetD8Async": [Pointer, c_ubyte, c_size_t, c_void_p],
    "cuStreamCreate": [POINTER(c_void_p), c_uint],
    "cuStreamDestroy_v2": [c_void_p],
    "cuStreamSynchronize": [c_void_p],
    "cuStreamBeginCapture_v2": [c_void_p, c_int],
    "cuStreamEndCapture": [c_void_p, POINTER(c_void_p)],
    "cuEventCreate": [POINTER(c_void_p), c_uint],
    "cuEventDestroy_v2": [c_void_p],
    "cuEventRecord": [c_void_p, c_void_p],
    "cuEventSynchronize": [c_void_p],
    "cuEventElapsedTime": [POINTER(ctypes.c_float), c_void_p, c_void_p],
    "cuModuleLoadData": [POINTER(c_void_p), c_char_p],
    "cuModuleUnload": [c_void_p],
    "cuModuleGetFunction": [POINTER(c_void_p), c_void_p, c_char_p],
    "cuFuncSetAttribute": [c_void_p, c_int, c_int],
    "cuLaunchKernelEx": [c_void_p, c_void_p, POINTER(c_void_p), POINTER(c_void_p)],
    "cuGraphInstantiateWithFlags": [POINTER(c_void_p), c_void_p, c_ulonglong],
    "cuGraphLaunch": [c_void_p, c_void_p],
    "cuGraphExecDestroy": [c_void_p],
    "cuGraphDestroy": [c_void_p],
    "cuGetErrorString": [c_int, POINTER(c_char_p)],
}


class LaunchAttribute(ctypes.Structure):
    """The C struct CUlaunchAttribute of cuda.h, whose value takes 64 bytes."""

    _fields_ = [("id", c_int), ("_padding", c_int), ("value", c_int * 16)]


class LaunchConfig(ctypes.Structure):
    """The C struct CUlaunchConfig of cuda.h."""

    _fields_ = [
        ("grid_x", c_uint),
        ("grid_y", c_uint),
        ("grid_z", c_uint),
        ("block_x", c_uint),
        ("block_y", c_uint),
        ("block_z", c_uint),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", POINTER(LaunchAttribute)),
        ("num_attributes", c_uint),
    ]


class OutOfMemory(InfercError):
    """The error that the device has less memory left than was asked for."""


def open_library() -> Any:
    """Open the driver's library and type its functions. Raises UnsupportedError if it is missing or too old."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise UnsupportedError(f"no NVIDIA driver on this machine ({error}); run this where a GPU is") from None
    for name, arguments in FUNCTIONS.items():
        try:
            getattr(library, name).argtypes = arguments
        except AttributeError:
            raise UnsupportedError(f"{LIBRARY} has no {name}: the NVIDIA driver is too old; update it") from None
    return library


class Driver:
    """The access to one NVIDIA GPU, by calls of its driver.

    library: what `open_library` returns, or a test's stand-in.
    """

    def __init__(self, device: int = 0, library: Any = None) -> None:
        self._library = open_library() if library is None else library
        self.call("cuInit", 0)
        count, handle, context = c_int(), c_int(), c_void_p()
        self.call("cuDeviceGetCount", byref(count))
        if not 0 <= device < count.value:
            raise UnsupportedError(f"no GPU {device}: the NVIDIA driver sees {count.value}")
        self.call("cuDeviceGet", byref(handle), device)
        self._device = handle.value
        self.call("cuDevicePrimaryCtxRetain", byref(context), self._device)
        self._context = context
        self.enter()
        name = ctypes.create_string_buffer(NAME_BYTES)
        self.call("cuDeviceGetName", name, NAME_BYTES, self._device)
        self.name = name.value.decode()
        self.capability = (self._attribute(COMPUTE_CAPABILITY_MAJOR), self._attribute(COMPUTE_CAPABILITY_MINOR))
        self.arch = "sm_{}{}".format(*self.capability)
        self.num_multiprocessors = self._attribute(MULTIPROCESSORS)
        self.max_shared_bytes = self._attribute(MAX_SHARED_BYTES_OPTIN)  # per block
        version = c_int()
        self.call("cuDriverGetVersion", byref(version))
        self.version = (version.value // 1000, version.value % 1000 // 10)  # the newest CUDA version it supports

    def enter(self) -> None:
        """Make the device the current one of the calling thread."""
        self.call("cuCtxSetCurrent", self._context)

    def close(self) -> None:
        """Release the context; memory allocated in it must be freed before."""
        self.call("cuDevicePrimaryCtxRelease_v2", self._device)

    # ------------------------------------------------------------------------------------- memory

    def memory_info(self) -> tuple[int, int]:
        """Return the number of free bytes and of all bytes."""
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def allocate(self, num_bytes: int) -> int:
        """Allocate device memory and return its address, a multiple of 256. Raises OutOfMemory."""
        address = Pointer()
        self.call("cuMemAlloc_v2", byref(address), max(num_bytes, 1))
        return address.value

    def free(self, address: int) -> None:
        self.call("cuMemFree_v2", address)

    def allocate_host(self, num_bytes: int) -> NDArray[np.uint8]:
        """Allocate pinned host memory, which the device copies from and to by itself; `free_host` frees it."""
        address = c_void_p()
        self.call("cuMemHostAlloc", byref(address), max(num_bytes, 1), 0)
        assert address.value is not None
        return np.ctypeslib.as_array((c_ubyte * max(num_bytes, 1)).from_address(address.value))

    def free_host(self, memory: NDArray[np.uint8]) -> None:
        self.call("cuMemFreeHost", memory.ctypes.data)

    def copy_in(self, address: int, source: int, num_bytes: int, stream: c_void_p) -> None:
        """Copy to the device from memory of `allocate_host`, which must not change until the copy is done."""
        self.call("cuMemcpyHtoDAsync_v2", address, source, num_bytes, stream)

    def copy_out(self, target: int, address: int, num_bytes: int, stream: c_void_p) -> None:
        """Copy from the device to memory of `allocate_host`, when the stream gets there."""
        self.call("cuMemcpyDtoHAsync_v2", target, address, num_bytes, stream)

    def copy_on_device(self, target: int, source: int, num_bytes: int, stream: c_void_p) -> None:
        """Copy between two places on the device that do not overlap, when the stream gets there."""
        self.call("cuMemcpyDtoDAsync_v2", target, source, num_bytes, stream)

    def read(self, target: int, address: int, num_bytes: int) -> None:
        """Copy from the device to any host address, and wait for it; whatever writes the source must have finished."""
        self.call("cuMemcpyDtoH_v2", target, address, num_bytes)

    def fill(self, address: int, value: int, num_bytes: int, stream: c_void_p) -> None:
        self.call("cuMemsetD8Async", address, value, num_bytes, stream)

    # ------------------------------------------------------------------------- streams and events

    def new_stream(self) -> c_void_p:
        stream = c_void_p()
        self.call("cuStreamCreate", byref(stream), STREAM_NON_BLOCKING)
        return stream

    def wait(self, stream: c_void_p) -> None:
        """Wait until everything given to the stream is done."""
        self.call("cuStreamSynchronize", stream)

    def new_event(self, timed: bool = False) -> c_void_p:
        event = c_void_p()
        self.call("cuEventCreate", byref(event), 0 if timed else EVENT_NO_TIMING)
        return event

    def record(self, event: c_void_p, stream: c_void_p) -> None:
        self.call("cuEventRecord", event, stream)

    def wait_event(self, event: c_void_p) -> None:
        """Wait until everything given to the stream before the event is done."""
        self.call("cuEventSynchronize", event)

    def milliseconds(self, start: c_void_p, end: c_void_p) -> float:
        """Return the milliseconds between two timed events that have completed."""
        found = ctypes.c_float()
        self.call("cuEventElapsedTime", byref(found), start, end)
        return found.value

    # -------------------------------------------------------------------------- kernels and graphs

    def load(self, code: bytes, record: LaunchRecord) -> Kernel:
        """Load the record's entry point from a cubin, or from PTX, which the driver compiles for this GPU.

        Raises UnsupportedError if the cubin is for another chip.
        """
        module, function = c_void_p(), c_void_p()
        self.call("cuModuleLoadData", byref(module), code)
        self.call("cuModuleGetFunction", byref(function), module, record.entry.encode())
        if record.shared_bytes > UNASKED_SHARED_BYTES:
            self.call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED_BYTES, record.shared_bytes)
        return Kernel(self, record, module, function)

    @contextmanager
    def capture(self, stream: c_void_p) -> Iterator[Capture]:
        """Capture what the stream is given within the block into the yielded capture's `graph`, in place of running it.

        Raises OutOfMemory if the device has no memory for the graph.
        """
        captured, graph, run = Capture(), c_void_p(), c_void_p()
        self.call("cuStreamBeginCapture_v2", stream, CAPTURE_THREAD_LOCAL)
        try:
            yield captured
        except BaseException:
            self._library.cuStreamEndCapture(stream, byref(graph))  # its own error is ignored in favour of the first
            if graph:
                self._library.cuGraphDestroy(graph)
            raise
        self.call("cuStreamEndCapture", stream, byref(graph))
        try:
            self.call("cuGraphInstantiateWithFlags", byref(run), graph, 0)
        finally:
            self.call("cuGraphDestroy", graph)
        captured.graph = run

    def launch_graph(self, graph: c_void_p, stream: c_void_p) -> None:
        """Launch a graph on the stream.

        Raises OutOfMemory, having given nothing to the stream, if the device has no memory for the graph.
        """
        self.call("cuGraphLaunch", graph, stream)

    def _attribute(self, attribute: int) -> int:
        value = c_int()
        self.call("cuDeviceGetAttribute", byref(value), attribute, self._device)
        return value.value

    def call(self, name: str, *args: Any) -> None:
        """Call a function of the API. Raises OutOfMemory, or InfercError with the driver's message."""
        code: int = getattr(self._library, name)(*args)
        if code != 0:
            text = c_char_p()
            self._library.cuGetErrorString(code, byref(text))
            message = f"{name} failed with CUDA error {code}: {(text.value or b'unknown error').decode()}"
            raise {OUT_OF_MEMORY: OutOfMemory, NO_BINARY: UnsupportedError, UNSUPPORTED_PTX: UnsupportedError}.get(
                code, InfercError
            )(message)


@dataclass
class Capture:
    """The result of a stream capture; `graph` is set once the capture is over."""

    graph: c_void_p | None = None


class Kernel:
    """A loaded entry point of a kernel."""

    def __init__(self, driver: Driver, record: LaunchRecord, module: c_void_p, function: c_void_p) -> None:
        self._driver, self._module, self._function = driver, module, function
        self.record = record

    def bind(self, values: Mapping[str, int]) -> Bound:
        """Bind the kernel to its arguments, ready for launches. values: device addresses by argument.

        Raises ValueError for an address without the alignment that the kernel was compiled for.
        """
        given = {**values, "global_scratch": 0, "profile_scratch": 0}
        for argument in self.record.arguments:
            if given[argument.name] % argument.divisible_by:
                raise ValueError(
                    f"{self.record.name}: {argument.name} is {given[argument.name]},"
                    f" which {argument.divisible_by} does not divide, as the kernel was promised"
                )
        cells = (c_uint64 * len(self.record.arguments))(*(given[each.name] for each in self.record.arguments))
        start = ctypes.addressof(cells)
        pointers = (c_void_p * len(cells))(*(start + 8 * index for index in range(len(cells))))
        config = LaunchConfig(1, 1, 1, self.record.threads, 1, 1, self.record.shared_bytes)
        config.attributes = ctypes.pointer(LaunchAttribute(PROGRAMMATIC_STREAM_SERIALIZATION, 0, (c_int * 16)(1)))
        return Bound(self, cells, pointers, config)

    def launch(self, stream: c_void_p, counts: Mapping[str, int], **values: int) -> None:
        """Launch the kernel on `stream`. values: the record's arguments except the two scratch pointers.

        counts: the counts that determine the grid: `num_tokens`, `num_rows` and `num_seqs`, as far as the grid uses
        them.
        """
        self.bind(values).launch(stream, grid_for(self.record, **counts))

    def unload(self) -> None:
        self._driver.call("cuModuleUnload", self._module)


@dataclass(frozen=True)
class Bound:
    """A kernel with its arguments."""

    kernel: Kernel
    _cells: Any  # the argument values that `_pointers` points to
    _pointers: Any
    _config: LaunchConfig

    def launch(self, stream: c_void_p, grid: tuple[int, int, int], *, behind_kernel: bool = False) -> None:
        """Give the launch to the stream.

        behind_kernel: the stream's last entry is a kernel launch, so this one may start while that one still runs
        (programmatic dependent launch).
        """
        config, kernel = self._config, self.kernel
        config.grid_x, config.grid_y, config.grid_z = grid
        config.stream = stream
        behind_kernel = behind_kernel and kernel.record.dependent and kernel._driver.version >= DEPENDENT_SINCE
        config.num_attributes = int(behind_kernel)
        kernel._driver.call("cuLaunchKernelEx", ctypes.addressof(config), kernel._function, self._pointers, None)
