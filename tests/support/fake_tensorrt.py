"""TensorRT's runtime without a GPU: plans built here are computed by their networks, in a fake driver's memory.

As the driver does, it computes no earlier than somebody waits for the stream, and refuses what TensorRT refuses: shapes
outside of the profile, addresses that are missing or not aligned, memory that is not the device's.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import tensorrt_rtx as trt
import torch
from fake_cuda import FakeCuda, Misuse, Stream
from tensorrt_network import Evaluated

from inferc.codegen.tensorrt import emit
from inferc.codegen.tensorrt.adapter import Building, Shapes
from inferc.codegen.tensorrt.network import TensorRTNetwork
from inferc.runtime.runners.cuda import driver

ALIGNMENT = 256
CONTEXT_BYTES = 1 << 16


@dataclass(frozen=True)
class Known:
    """A plan that was built in this process."""

    network: Evaluated
    profiles: list[Shapes]


def digest(plan: Any) -> str:
    return hashlib.sha256(memoryview(plan).cast("B")).hexdigest()


@contextmanager
def plans_are_kept() -> Iterator[dict[str, Known]]:
    """Keep the network of each plan that is compiled within the block, by the plan's digest."""
    known: dict[str, Known] = {}
    nets: dict[int, TensorRTNetwork] = {}
    build, plan = emit.build, Building.plan

    def build_and_keep(*args: Any) -> TensorRTNetwork:
        net = build(*args)
        nets[id(net.network)] = net
        return net

    def plan_and_keep(self: Building, profiles: Sequence[Shapes], *, tf32: bool) -> Any:
        made = plan(self, profiles, tf32=tf32)
        known[digest(made)] = Known(Evaluated(self.network, nets.pop(id(self.network)).weights), list(profiles))
        return made

    with mock.patch.object(emit, "build", build_and_keep), mock.patch.object(Building, "plan", plan_and_keep):
        yield known


class Context:
    def __init__(self, engine: Engine) -> None:
        self._engine, self._profile, self._memory = engine, -1, 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._ran: dict[str, tuple[int, ...]] | None = None  # with which shapes, when last
        self._captured: dict[str, tuple[int, ...]] | None = None

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self._profile = index
        return index < len(self._engine.known.profiles)

    def set_device_memory(self, address: int, size: int) -> None:
        assert size >= CONTEXT_BYTES and address % ALIGNMENT == 0
        self._engine.cuda._on_device(address, size, "memory of a context")
        self._memory = address

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        least, _, most = self._engine.known.profiles[self._profile][name]
        fits = all(low <= size <= high for low, size, high in zip(least, shape, most, strict=True))
        if not fits:
            self._engine.say(f"{name} of {tuple(shape)} is not in profile {self._profile}, {least} to {most}")
        self._shapes[name] = tuple(shape)
        if self._captured is not None and self._captured[name] != tuple(shape):
            raise Misuse(f"a context that a graph was captured of with {name} of {self._captured[name]} gets {shape}")
        return fits

    def set_tensor_address(self, name: str, address: int) -> bool:
        if address % ALIGNMENT:
            self._engine.say(f"{name} at {address:#x} is not aligned")
            return False
        self._addresses[name] = address
        return True

    def execute_async_v3(self, handle: int) -> bool:
        engine, cuda = self._engine, self._engine.cuda
        network, shapes, addresses = engine.known.network, dict(self._shapes), dict(self._addresses)
        stream: Stream = cuda._given(handle, "a step")
        if stream.captured is not None:
            if self._ran != shapes:
                raise Misuse(f"captured with {shapes}, and it ran with {self._ran}")
            if not engine.capturable:
                engine.say("the fake engine is not captured")
                return False
            self._captured = shapes
        self._ran = shapes
        shapes = {**{name: shape for name, shape in network.shapes.items() if min(shape, default=0) >= 0}, **shapes}
        assert self._memory, "a context without its memory"
        if engine.fails:
            engine.say("the fake engine broke")
            return False
        inputs = {name: self._tensor(name, shapes[name], addresses[name]) for name in network.shapes}
        for name in network.outputs:
            if name.endswith(".out"):
                assert addresses[name] == addresses[name.removesuffix(".out")], f"{name} is not where its cache is"
        sizes = tuple(len(inputs[name]) for name in ("starts", "token_ids", "logits_rows") if name in inputs)

        def compute() -> None:
            engine.calls.append(sizes)
            for name, value in network(inputs).items():
                size = value.numel() * value.element_size()
                cuda._on_device(addresses[name], size, name)
                if not name.endswith(".out"):
                    ctypes.memmove(addresses[name], value.contiguous().data_ptr(), size)

        stream.add(compute)
        return True

    def is_stream_capturable(self, handle: int) -> bool:
        assert isinstance(self._engine.cuda._given(handle, "a question"), Stream)
        return self._engine.capturable

    def _tensor(self, name: str, shape: tuple[int, ...], address: int) -> torch.Tensor:
        dtype = self._engine.known.network.dtypes[name]
        size = torch.Size(shape).numel() * dtype.itemsize
        self._engine.cuda._on_device(address, size, name)
        return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype).reshape(shape)


class RuntimeConfig:
    """The options with which a context of TensorRT-RTX is made."""

    strategy: Any = None
    dynamic_shapes_kernel_specialization_strategy = trt.DynamicShapesKernelSpecializationStrategy.LAZY

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self.strategy = strategy


class Engine:
    device_memory_size_v2 = CONTEXT_BYTES

    def __init__(self, known: Known, cuda: FakeCuda, logger: Any) -> None:
        self.known, self.cuda, self._logger = known, cuda, logger
        self.calls: list[tuple[int, ...]] = []  # sequences, tokens, rows
        self.contexts: list[Any] = []  # how each was made
        self.fails = False
        self.in_place = self.capturable = True

    def say(self, text: str) -> None:
        self._logger.log(trt.ILogger.Severity.ERROR, text)

    def create_runtime_config(self) -> RuntimeConfig:
        return RuntimeConfig()

    def create_execution_context(self, how: Any) -> Context:
        strategy = how.strategy if isinstance(how, RuntimeConfig) else how
        assert strategy == trt.ExecutionContextAllocationStrategy.USER_MANAGED
        self.contexts.append(how)
        return Context(self)

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return name.removesuffix(".out") if self.in_place and name.endswith(".out") else None


class FakeTensorRT(ModuleType):
    """The module `tensorrt_rtx` where artifacts of `known` plans run."""

    def __init__(self, known: Mapping[str, Known], cuda: FakeCuda) -> None:
        super().__init__("tensorrt_rtx")
        self.__spec__ = ModuleSpec("tensorrt_rtx", None)
        self.__version__ = trt.__version__
        self.ILogger = trt.ILogger
        self.ExecutionContextAllocationStrategy = trt.ExecutionContextAllocationStrategy
        self.DynamicShapesKernelSpecializationStrategy = trt.DynamicShapesKernelSpecializationStrategy
        self.EngineValidity, self.EngineInvalidityDiagnostics = trt.EngineValidity, trt.EngineInvalidityDiagnostics
        self.validity = (trt.EngineValidity.VALID, 0)
        self.in_place = self.capturable = True
        self.engines: list[Engine] = []
        self.cuda = cuda
        fake = self

        class Runtime:
            def __init__(self, logger: Any) -> None:
                self._logger = logger

            def get_engine_validity(self, plan: Any) -> tuple[Any, int]:
                return fake.validity

            def deserialize_cuda_engine(self, plan: Any) -> Engine | None:
                if digest(plan) not in known:
                    self._logger.log(trt.ILogger.Severity.ERROR, "Serialized engine does not conform to its format")
                    return None
                fake.engines.append(Engine(known[digest(plan)], fake.cuda, self._logger))
                fake.engines[-1].in_place, fake.engines[-1].capturable = fake.in_place, fake.capturable
                return fake.engines[-1]

        self.Runtime = Runtime


@contextmanager
def on_fake_gpu(
    known: Mapping[str, Known], capability: tuple[int, int] = (8, 6), folder: Path | None = None
) -> Iterator[FakeTensorRT]:
    """A GPU for `load_engine` and what is above it; that nothing is left on it is checked in the end.

    folder: of an artifact whose kernels it knows.
    """
    cuda = FakeCuda(folder, capability=capability)
    fake = FakeTensorRT(known, cuda)
    opened = mock.patch.object(driver, "open_library", lambda: cuda)
    with mock.patch.dict(sys.modules, {"tensorrt_rtx": fake}), opened:
        yield fake
    cuda.check()
    assert not cuda.device and not cuda.host, "memory is left"
