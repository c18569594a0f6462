"""Load a cubin and launch it through the CUDA driver API: ctypes and the launch record, no Triton, no compiler.

What the CUDA target's runner will do for a whole step; today the GPU tests and benchmarks use it for one kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from inferc.codegen.triton.launch import LaunchRecord
from inferc.errors import UnsupportedError

MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
UNASKED_SHARED_BYTES = 48 << 10  # a block may use this much without asking
COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR = 75, 76
CTYPES = {"pointer": ctypes.c_uint64, "u64": ctypes.c_uint64, "i64": ctypes.c_int64, "i32": ctypes.c_int32}


class CudaDriver:
    """One GPU's driver, in its primary context: the one that torch uses too, so their pointers are interchangeable."""

    def __init__(self, device: int = 0) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise UnsupportedError(f"no NVIDIA driver on this machine ({error}); run this where a GPU is") from None
        self._call("cuInit", 0)
        handle, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(handle), device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        self._call("cuCtxSetCurrent", context)
        self.arch = "sm_" + "".join(
            str(self._device_attribute(handle, attribute))
            for attribute in (COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR)
        )

    def load(self, cubin: bytes, record: LaunchRecord) -> CudaKernel:
        """Load the record's entry. Raises UnsupportedError if the cubin is for another chip."""
        if record.arch != self.arch:
            raise UnsupportedError(f"{record.name} is compiled for {record.arch}, this GPU is {self.arch}")
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(cubin))
        self._call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(record.entry.encode()))
        if record.shared_bytes > UNASKED_SHARED_BYTES:
            self._call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED_BYTES, record.shared_bytes)
        return CudaKernel(self, record, function)

    def _device_attribute(self, handle: ctypes.c_int, attribute: int) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, handle)
        return value.value

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._cuda, name)(*args)
        if code != 0:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, ctypes.byref(text))
            reason = (text.value or b"unknown error").decode()
            raise UnsupportedError(f"{name} failed with CUDA error {code}: {reason}")


class CudaKernel:
    """A loaded entry point."""

    def __init__(self, driver: CudaDriver, record: LaunchRecord, function: ctypes.c_void_p) -> None:
        self._driver, self._function = driver, function
        self.record = record

    def launch(self, stream: int, counts: Mapping[str, int], **values: int) -> None:
        """Launch on `stream` (0: the default one). `values` are the record's arguments but for the two scratch pointers.

        counts: what the grid goes by, `num_tokens`, `num_rows` and `num_seqs`, as far as it does.
        Pointers are device addresses. Nothing waits: an error of the kernel itself shows at the next synchronisation.
        """
        record = self.record
        given = {**values, "global_scratch": 0, "profile_scratch": 0}
        for argument in record.arguments:
            if given[argument.name] % argument.divisible_by:
                raise ValueError(
                    f"{record.name}: {argument.name} is {given[argument.name]},"
                    f" which {argument.divisible_by} does not divide, as the kernel was promised"
                )
        cells = [CTYPES[argument.kind](given[argument.name]) for argument in record.arguments]
        pointers = (ctypes.c_void_p * len(cells))(*(ctypes.addressof(cell) for cell in cells))
        self._driver._call(
            "cuLaunchKernel",
            self._function,
            *(ctypes.c_uint(size) for size in record.grid_for(**counts)),
            *(ctypes.c_uint(size) for size in (record.threads, 1, 1)),
            ctypes.c_uint(record.shared_bytes),
            ctypes.c_void_p(stream),
            pointers,
            None,
        )
