"""A CUDA driver without a GPU: host memory for the device's, kernels in Triton's interpreter, and every call checked.

What is given to a stream is done no earlier than somebody waits for it, as late as a real one might: memory that the
host writes too early, or reads too early, gives wrong numbers here as well. Run with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import itertools
import pkgutil
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import quick_interpreter
import torch

import inferc.codegen.triton as kernels
from inferc.codegen.triton.aot.launch import read_entry
from inferc.codegen.triton.aot.source import absent
from inferc.manifest_types import LaunchRecord, read_typed
from inferc.runtime.runners.cuda.driver import FUNCTIONS, LaunchConfig

DTYPES = {
    "*fp32": torch.float32,
    "*fp64": torch.float64,
    "*bf16": torch.bfloat16,
    "*fp16": torch.float16,
    "*i32": torch.int32,
    "*i64": torch.int64,
    "*i8": torch.int8,
}
POISON, GUARD = 0xFF, 0xA5
GUARD_BYTES = 64
ALIGNMENT = 256
INVALID_VALUE, OUT_OF_MEMORY, NO_BINARY, NOT_IN_CAPTURE = 1, 2, 209, 900
UNASKED_SHARED_BYTES = 48 << 10
MAX_SHARED_BYTES = {(8, 0): 163 << 10, (8, 6): 99 << 10, (8, 9): 99 << 10, (12, 0): 99 << 10}  # others: 227 KB
Work = Callable[[], object]


class Misuse(AssertionError):
    """A call that a GPU would answer with a fault, or with silence and wrong numbers."""


@dataclass
class Memory:
    """An allocation; guards lie on both sides of it."""

    start: int
    size: int
    buffer: Any

    def check_guards(self) -> None:
        for at in (self.start - GUARD_BYTES, self.start + self.size):
            if ctypes.string_at(at, GUARD_BYTES) != bytes([GUARD]) * GUARD_BYTES:
                raise Misuse(f"something wrote beyond an allocation of {self.size} bytes")


@dataclass
class Stream:
    queue: list[Work] = field(default_factory=list)
    captured: list[Work] | None = None
    last: str = "nothing"  # that it was given

    def add(self, work: Work) -> None:
        (self.queue if self.captured is None else self.captured).append(work)

    def run(self, count: int | None = None) -> None:
        count = len(self.queue) if count is None else count
        ready, self.queue = self.queue[:count], self.queue[count:]
        for work in ready:
            work()


class Graph(list[Work]):
    pass


class Executable(list[Work]):
    """A graph as it is launched."""


@dataclass
class Event:
    stream: Stream | None = None
    done: dict[str, bool] = field(default_factory=dict)


@dataclass
class Function:
    record: LaunchRecord
    run: Any
    shared_limit: int = UNASKED_SHARED_BYTES


def _modules() -> list[ModuleType]:
    found = pkgutil.walk_packages(kernels.__path__, kernels.__name__ + ".")
    return [importlib.import_module(each.name) for each in found]


class FakeCuda:
    """The functions of `inferc.runtime.runners.cuda.driver.FUNCTIONS`. folder: an artifact whose kernels it knows.

    execute: whether kernels run; otherwise launches are checked, memory is zero and every id is 0. max_graphs: for how
    many there is memory. max_shared_bytes: of a block, in place of what the chip has.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        total_bytes: int = 1 << 32,
        capability: tuple[int, int] = (9, 0),
        version: int = 13000,
        execute: bool = True,
        max_graphs: int | None = None,
        max_shared_bytes: int | None = None,
    ) -> None:
        self.total_bytes, self.capability, self.version, self.execute = total_bytes, capability, version, execute
        self.max_graphs = max_graphs
        self.max_shared_bytes = max_shared_bytes or MAX_SHARED_BYTES.get((capability[0], capability[1]), 227 << 10)
        self.calls: Counter[str] = Counter()
        self.dependent_launches = 0
        self.launched: Counter[str] = Counter()
        self.device: dict[int, Memory] = {}
        self.host: dict[int, Memory] = {}
        self._objects: dict[int, Any] = {}
        self._num_retained = 0  # drivers that have the device's context
        self._handles = itertools.count(0x1000, 16)
        self._known: dict[str, LaunchRecord] = {}
        self._kernels = {
            name: value for module in _modules() for name, value in vars(module).items() if name.endswith("_kernel")
        }
        if folder is not None:
            self.know_all(folder)

    def know_all(self, folder: Path) -> None:
        """Tell the driver what the cubins of an artifact compute."""
        for path in sorted(folder.glob("kernels/*/records.json")):
            for record in read_typed(path.read_bytes(), list[LaunchRecord]):
                suffix = "ptx" if path.parent.name == "ptx" else "cubin"
                self.know((path.parent / f"{record.name}.{suffix}").read_bytes(), record)

    def know(self, code: bytes, record: LaunchRecord) -> None:
        """Tell the driver what a cubin computes, since it cannot run it."""
        self._known[hashlib.sha256(code).hexdigest()] = record

    def __getattr__(self, name: str) -> Any:
        function = type(self).__dict__.get("_" + name.removesuffix("_v2"))
        if function is None:
            raise AttributeError(name)

        def call(*args: Any) -> int:
            self.calls[name.removesuffix("_v2")] += 1
            for kind, each in zip(FUNCTIONS.get(name, ()), args, strict=name in FUNCTIONS):
                kind.from_param(each)  # what ctypes would refuse
            return function(self, *args) or 0

        self.__dict__[name] = call
        return call

    def _new(self, target: Any, value: Any) -> None:
        """Hand out a handle of an object."""
        handle = next(self._handles)
        self._objects[handle] = value
        target._obj.value = handle

    def _of(self, handle: Any, kind: type[Any]) -> Any:
        found = self._objects.get(getattr(handle, "value", handle))
        if not isinstance(found, kind):
            raise Misuse(f"{handle} is no {kind.__name__}")
        return found

    # --------------------------------------------------------------------------------- device

    def _cuInit(self, flags: int) -> None:
        assert flags == 0

    def _cuDriverGetVersion(self, out: Any) -> None:
        out._obj.value = self.version

    def _cuDeviceGetCount(self, out: Any) -> None:
        out._obj.value = 1

    def _cuDeviceGet(self, out: Any, index: int) -> None:
        assert index == 0
        out._obj.value = 0

    def _cuDeviceGetName(self, buffer: Any, size: int, device: int) -> None:
        buffer.value = b"Fake GPU"

    def _cuDeviceGetAttribute(self, out: Any, attribute: int, device: int) -> None:
        values = {75: self.capability[0], 76: self.capability[1], 16: 132, 97: self.max_shared_bytes}
        out._obj.value = values[attribute]

    def _cuDevicePrimaryCtxRetain(self, out: Any, device: int) -> None:
        self._num_retained += 1
        out._obj.value = 0x77

    def _cuDevicePrimaryCtxRelease(self, device: int) -> None:
        self._num_retained -= 1
        if self._num_retained:
            return
        if self.device or self.host:
            raise Misuse(f"{len(self.device)} allocations are left, {len(self.host)} on the host")
        if left := sum(isinstance(each, Graph | Executable) for each in self._objects.values()):
            raise Misuse(f"{left} graphs are left")

    def _cuCtxSetCurrent(self, context: Any) -> None:
        assert context.value == 0x77

    def _cuGetErrorString(self, code: int, out: Any) -> None:
        out._obj.value = {2: b"out of memory", 209: b"no kernel image is available"}.get(code, b"an error")

    # --------------------------------------------------------------------------------- memory

    def _cuMemGetInfo(self, free: Any, total: Any) -> None:
        total._obj.value = self.total_bytes
        free._obj.value = self.total_bytes - sum(memory.size for memory in self.device.values())

    def _allocate(self, size: int, where: dict[int, Memory], fill: int) -> int:
        buffer = ctypes.create_string_buffer(size + 2 * GUARD_BYTES + ALIGNMENT)
        start = -(-(ctypes.addressof(buffer) + GUARD_BYTES) // ALIGNMENT) * ALIGNMENT
        ctypes.memset(start - GUARD_BYTES, GUARD, GUARD_BYTES)
        ctypes.memset(start, fill, size)
        ctypes.memset(start + size, GUARD, GUARD_BYTES)
        where[start] = Memory(start, size, buffer)
        return start

    def _cuMemAlloc(self, out: Any, size: int) -> int:
        if any(stream.captured is not None for stream in self._streams()):
            return NOT_IN_CAPTURE
        if sum(memory.size for memory in self.device.values()) + size > self.total_bytes:
            return OUT_OF_MEMORY
        out._obj.value = self._allocate(size, self.device, POISON if self.execute else 0)
        return 0

    def _cuMemHostAlloc(self, out: Any, size: int, flags: int) -> None:
        out._obj.value = self._allocate(size, self.host, POISON)

    def _free(self, address: int, where: dict[int, Memory]) -> None:
        if address not in where:
            raise Misuse(f"{address:#x} was not allocated, or freed before")
        where.pop(address).check_guards()

    def _cuMemFree(self, address: int) -> None:
        for stream in self._streams():
            stream.run()
        self._free(address, self.device)

    def _cuMemFreeHost(self, address: Any) -> None:
        self._free(getattr(address, "value", address), self.host)

    def _streams(self) -> list[Stream]:
        return [each for each in self._objects.values() if isinstance(each, Stream)]

    def _inside(self, address: int, size: int, where: dict[int, Memory]) -> Memory | None:
        return next((m for m in [*where.values()] if m.start <= address and address + size <= m.start + m.size), None)

    def _on_device(self, address: int, size: int, what: str) -> None:
        if self._inside(address, size, self.device) is None:
            raise Misuse(f"{what}: {size} bytes at {address:#x} are not in one allocation")

    def _on_host(self, address: int, size: int, what: str) -> None:
        if self._inside(address, size, self.host) is None:
            raise Misuse(
                f"{what}: {size} bytes at {address:#x} are not in pinned memory, which a GPU does not copy by itself"
            )

    def _given(self, stream: Any, what: str) -> Stream:
        """The stream, which is given something that is no kernel."""
        found: Stream = self._of(stream, Stream)
        found.last = what
        return found

    def _cuMemcpyHtoDAsync(self, to: int, source: int, size: int, stream: Any) -> None:
        self._on_device(to, size, "copy to the device")
        self._on_host(source, size, "copy to the device")
        given = ctypes.string_at(source, size)

        def copy() -> None:
            if ctypes.string_at(source, size) != given:
                raise Misuse(f"{size} bytes of the host were written before their copy to the device was done")
            ctypes.memmove(to, source, size)

        self._given(stream, "copy").add(copy)

    def _cuMemcpyDtoHAsync(self, to: int, source: int, size: int, stream: Any) -> None:
        self._on_device(source, size, "copy from the device")
        self._on_host(to, size, "copy from the device")
        self._given(stream, "copy").add(lambda: ctypes.memmove(to, source, size))

    def _cuMemcpyDtoDAsync(self, to: int, source: int, size: int, stream: Any) -> None:
        self._on_device(source, size, "copy on the device")
        self._on_device(to, size, "copy on the device")
        if abs(to - source) < size:
            raise Misuse(f"copy on the device: {size} bytes at {source:#x} and at {to:#x} overlap")
        self._given(stream, "copy").add(lambda: ctypes.memmove(to, source, size))

    def _cuMemcpyDtoH(self, to: Any, source: int, size: int) -> None:
        """Waits for itself, and for no stream."""
        self._on_device(source, size, "copy from the device")
        ctypes.memmove(to, source, size)

    def _cuMemsetD8Async(self, address: int, value: int, size: int, stream: Any) -> None:
        if size:
            self._on_device(address, size, "fill")
        self._given(stream, "fill").add(lambda: ctypes.memset(address, value, size))

    # ---------------------------------------------------------------------- streams and events

    def _cuStreamCreate(self, out: Any, flags: int) -> None:
        self._new(out, Stream())

    def _cuStreamDestroy(self, stream: Any) -> None:
        self._of(stream, Stream).run()

    def _cuStreamSynchronize(self, stream: Any) -> int:
        found = self._of(stream, Stream)
        if found.captured is not None:
            return NOT_IN_CAPTURE
        found.run()
        return 0

    def _cuEventCreate(self, out: Any, flags: int) -> None:
        self._new(out, Event())

    def _cuEventDestroy(self, event: Any) -> None:
        self._of(event, Event)

    def _cuEventRecord(self, event: Any, stream: Any) -> None:
        of, found = self._of(stream, Stream), self._of(event, Event)
        done: dict[str, bool] = {}
        found.stream, found.done = of, done
        of.add(lambda: done.setdefault("over", True))

    def _cuEventSynchronize(self, event: Any) -> None:
        found = self._of(event, Event)
        while found.stream is not None and "over" not in found.done:
            found.stream.run(1)

    def _cuEventElapsedTime(self, out: Any, start: Any, end: Any) -> None:
        out._obj.value = 1.0

    # ---------------------------------------------------------------------- kernels and graphs

    def _cuModuleLoadData(self, out: Any, code: bytes) -> int:
        record = self._known.get(hashlib.sha256(code).hexdigest())
        if record is None:
            return NO_BINARY
        if any(stream.captured is not None for stream in self._streams()):
            return NOT_IN_CAPTURE
        if code[:4] == b"\x7fELF" and (info := read_entry(code, record.entry, record.name)):
            sizes = [size for _, size in info.parameters]
            assert sizes == [argument.num_bytes for argument in record.arguments], record.name
        self._new(out, record)
        return 0

    def _cuModuleUnload(self, module: Any) -> None:
        self._of(module, LaunchRecord)

    def _cuModuleGetFunction(self, out: Any, module: Any, name: bytes) -> None:
        record = self._of(module, LaunchRecord)
        assert record.entry == name.decode()
        self._new(out, Function(record, self._kernels.get(record.entry)))

    def _cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:
        assert attribute == 8
        if value > self.max_shared_bytes:
            return INVALID_VALUE
        self._of(function, Function).shared_limit = value
        return 0

    def _cuLaunchKernelEx(self, config: int, function: Any, pointers: Any, extra: Any) -> int:
        of = LaunchConfig.from_address(config)
        found: Function = self._of(function, Function)
        record, grid, shared = found.record, (of.grid_x, of.grid_y, of.grid_z), of.shared_bytes
        if min(grid) < 1 or max(grid[1:]) > 65535 or shared > found.shared_limit:
            return INVALID_VALUE
        stream: Stream = self._of(of.stream, Stream)
        block = (of.block_x, of.block_y, of.block_z)
        if block != (record.threads, 1, 1) or shared != record.shared_bytes or extra is not None:
            raise Misuse(f"{record.name}: launched with {block} threads and {shared} bytes of shared memory")
        if of.num_attributes:
            attribute = of.attributes[0]
            assert (of.num_attributes, attribute.id, attribute.value[0]) == (1, 6, 1), record.name
            if not record.dependent:
                raise Misuse(f"{record.name} does not wait for the kernel before it")
            if stream.last != "kernel":
                raise Misuse(f"{record.name} is launched behind a {stream.last}, for which it does not wait")
            self.dependent_launches += 1
        stream.last = "kernel"
        values = [ctypes.c_uint64.from_address(pointers[i]).value for i in range(len(record.arguments))]
        for argument, value in zip(record.arguments, values, strict=True):
            if argument.name.endswith("_scratch"):
                assert value == 0 and record.global_scratch_bytes == 0, record.name
                continue
            self._on_device(value, 1, f"{record.name}: {argument.name}")
            if value % argument.divisible_by:
                raise Misuse(f"{record.name}: {argument.name} is {value:#x}")
        stream.add(lambda: self._interpret(found, grid, values))
        return 0

    def _interpret(self, function: Function, grid: tuple[int, ...], values: list[int]) -> None:
        record = function.record
        self.launched[record.name] += 1
        if not self.execute:
            return
        tensors = []
        for argument, value in zip(record.arguments, values, strict=True):
            if not argument.name.endswith("_scratch"):
                dtype = DTYPES[argument.kind]
                self._on_device(value, dtype.itemsize, f"{record.name}: {argument.name}")
                # The interpreter goes by the address alone; of arguments at one address all must be of one size.
                tensors.append(torch.frombuffer((ctypes.c_char * 8).from_address(value), dtype=dtype))
        constants = {**record.constants, **({"WIDE_DOT": 1} if "WIDE_DOT" in record.constants else {})}
        given = [argument.name for argument in record.arguments]
        constants |= absent(function.run, (*given, *constants))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the interpreter's, of numpy, and of divisions as a GPU does them
            quick_interpreter.use()
            function.run[grid](*tensors, **constants)

    def _cuStreamBeginCapture(self, stream: Any, mode: int) -> None:
        found = self._of(stream, Stream)
        assert found.captured is None and mode == 1
        found.captured, found.last = [], "begin of a graph"

    def _cuStreamEndCapture(self, stream: Any, out: Any) -> None:
        found = self._of(stream, Stream)
        assert found.captured is not None
        self._new(out, Graph(found.captured))
        found.captured, found.last = None, "end of a graph"

    def _cuGraphInstantiateWithFlags(self, out: Any, graph: Any, flags: int) -> int:
        given = self._of(graph, Graph)
        if self.max_graphs == len(self.graphs()):
            return OUT_OF_MEMORY
        self._new(out, Executable(given))
        return 0

    def _cuGraphLaunch(self, graph: Any, stream: Any) -> None:
        of = self._given(stream, "graph")
        for work in self._of(graph, Executable):
            of.add(work)

    def _cuGraphExecDestroy(self, graph: Any) -> None:
        self._of(graph, Executable)
        del self._objects[graph.value]

    def _cuGraphDestroy(self, graph: Any) -> None:
        self._of(graph, Graph)
        del self._objects[graph.value]

    def graphs(self) -> list[Executable]:
        return [each for each in self._objects.values() if isinstance(each, Executable)]

    def check(self) -> None:
        """Assert that no kernel wrote where nothing was allocated."""
        for memory in (*self.device.values(), *self.host.values()):
            memory.check_guards()
