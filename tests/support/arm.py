"""Libraries for AArch64 on another machine: cross-compiled, and called in an emulator."""

from __future__ import annotations

import ctypes
import mmap
import platform
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpp_kernels import FOLDER, UNITS, Kernels, build_units, building
from numpy.typing import NDArray
from torch import Tensor

from inferc.codegen.cpp import build as cpp_build
from inferc.codegen.cpp.build import MACHINE_ISAS, Unit, find_compiler

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
ARM_ISAS = MACHINE_ISAS["aarch64"]
# A processor that has what the library was compiled for, and for neon no more than that.
PROCESSORS = {"neon": "neoverse-n1", "neon_bf16": "max"}
DRIVER = FOLDER.parent / "arm_driver.cpp"
MISSING = [name for name in (COMPILER, EMULATOR) if not shutil.which(name)]
INTS, FLOATS = 32, 8  # arguments of each kind, as in arm_driver.cpp
MEMORY = 1 << 29  # that both sides map; what nobody writes takes no room
CANARY = b"\xa5" * 64  # behind what a call may write to

needs_arm = (
    pytest.mark.skipif(platform.machine() == "aarch64", reason="this machine runs the code itself"),
    pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)}: not installed"),
)


def build_arm(units: Sequence[Unit], isa: str) -> Path:
    """The library of `units`. Processes that want the same one wait for who builds it."""
    if any("-fsanitize" in flag for flag in cpp_build.FLAGS):
        pytest.skip("the emulator runs no sanitizers")
    with building(isa):
        return build_units(units, isa, find_compiler(COMPILER))


@lru_cache(maxsize=1)
def _driver() -> tuple[Path, tempfile.TemporaryDirectory[str]]:
    folder = tempfile.TemporaryDirectory(prefix="inferc-arm-")
    out = Path(folder.name) / "driver"
    flags = ("-O1", "-std=c++20", "-rdynamic", "-Wall", "-Wextra", "-Werror")
    subprocess.run([COMPILER, *flags, str(DRIVER), "-o", str(out), "-ldl"], check=True)
    return out, folder


@lru_cache(maxsize=1)
def _libraries() -> Path:
    """The folder under which the emulated process finds its loader and libc."""
    found = subprocess.run([COMPILER, "-print-file-name=libc.so.6"], capture_output=True, text=True, check=True)
    return Path(found.stdout.strip()).resolve().parents[1]


class Process:
    """A library loaded in an emulated process, and memory that both see, given out here."""

    def __init__(self, library: Path, isa: str) -> None:
        with tempfile.TemporaryFile() as file:
            file.truncate(MEMORY)
            self.memory = mmap.mmap(file.fileno(), MEMORY)
            emulator = (EMULATOR, "-cpu", PROCESSORS[isa], "-L", str(_libraries()))
            command = (*emulator, str(_driver()[0]), str(library), str(file.fileno()), str(MEMORY))
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, pass_fds=(file.fileno(),))
        self._base = int.from_bytes(self._read(), "little")
        self._used = 0
        self._symbols: dict[str, int] = {}

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        assert self._process.wait(10) == 0
        self._process.stdout.close()
        self.memory.close()

    def put(self, data: bytes | memoryview | NDArray[Any] | ctypes.Structure) -> int:
        """The address of a copy."""
        held = np.ascontiguousarray(data).tobytes() if isinstance(data, np.ndarray) else memoryview(data).cast("B")
        at = self._used
        self._used += -(-len(held) // 64) * 64
        self.memory[at : at + len(held)] = held
        return self._base + at

    def read(self, address: int, size: int) -> bytes:
        at = address - self._base
        return self.memory[at : at + size]

    def forget(self) -> None:
        """Give back what was put."""
        self._used = 0

    def symbol(self, name: str) -> int:
        """The address of a function of the library, or of the driver."""
        if name not in self._symbols:
            found = int.from_bytes(self._ask(struct.pack("<q", len(name)) + name.encode()), "little")
            assert found, f"no function {name}"
            self._symbols[name] = found
        return self._symbols[name]

    def call(self, name: str, *args: float, returns: Any = ctypes.c_int) -> Any:
        """Call a function with addresses and integers as int and float32 as float."""
        ints = [int(arg) & 0xFFFFFFFFFFFFFFFF for arg in args if not isinstance(arg, float)]
        floats = [arg for arg in args if isinstance(arg, float)]
        assert len(ints) <= INTS and len(floats) <= FLOATS
        ints += [0] * (INTS - len(ints))
        floats += [0.0] * (FLOATS - len(floats))
        double = returns is ctypes.c_double
        answer = self._ask(struct.pack(f"<qqq{INTS}Q{FLOATS}f", 0, self.symbol(name), double, *ints, *floats))
        return struct.unpack("<d", answer)[0] if double else returns(int.from_bytes(answer, "little")).value

    def _ask(self, request: bytes) -> bytes:
        assert self._process.stdin
        self._process.stdin.write(request)
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> bytes:
        assert self._process.stdout
        data = self._process.stdout.read(8)
        if len(data) != 8:
            with self._process:  # else its pipes are reported in whichever test runs when they are collected
                raise AssertionError(f"the emulated process ended ({self._process.wait(10)})")
        return data


class ArmKernels(Kernels):
    """`Kernels` in an emulator: what a call is given goes there before it and comes back after it."""

    def __init__(self, isa: str, num_threads: int = 2) -> None:
        self.process = Process(build_arm(UNITS, isa), isa)
        self.isa, self.num_threads = isa, num_threads
        self.threads = ctypes.c_void_p(self.process.call("threads_open", num_threads, returns=ctypes.c_int64))
        self._lent: dict[int, tuple[int, memoryview]] = {}  # by address here: address there, and what it is

    def close(self) -> None:
        self.process.call("threads_close", self._convert(self.threads))
        self.process.close()

    def address(self, held: NDArray[Any] | ctypes.Structure) -> int:
        """Return the address at which the next call finds an array or a struct."""
        if isinstance(held, ctypes.Structure):
            return self._lend(ctypes.addressof(held), ctypes.sizeof(held))
        return self._lend(held.ctypes.data, held.nbytes)

    def __call__(self, name: str, *args: Any) -> Any:
        sent = [self._convert(arg) for arg in args]
        lent = tuple(self._lent.values())
        self._lent.clear()
        self.process.forget()
        result = self.process.call(name, *sent, returns=RETURNS.get(name, ctypes.c_int))
        for address, data in lent:
            found = self.process.read(address, len(data) + len(CANARY))
            data[:] = found[: len(data)]
            assert found[len(data) :] == CANARY, f"{name} writes behind a buffer"
        return result

    def _lend(self, host: int, size: int) -> int:
        if not size:
            return 0
        if host not in self._lent:
            data = memoryview((ctypes.c_char * size).from_address(host)).cast("B")
            self._lent[host] = self.process.put(bytes(data) + CANARY), data
        return self._lent[host][0]

    def _convert(self, arg: Any) -> float:
        if isinstance(arg, Tensor):
            storage = arg.untyped_storage()
            return self._lend(storage.data_ptr(), storage.nbytes()) + arg.data_ptr() - storage.data_ptr()
        if isinstance(arg, (np.ndarray, ctypes.Structure)):
            return self.address(arg)
        if isinstance(arg, ctypes.c_void_p):
            return arg.value or 0
        return 0 if arg is None else arg


RETURNS = {"test_uniform": ctypes.c_double, "test_barriers": ctypes.c_int64, "test_each": ctypes.c_int64}
