"""The TensorRT engines of a step's segments, which run between the compiled kernels on the same stream.

An engine reads and writes values in the kernels' memory, and weights where every kernel has them, so nothing is copied.
Identical layers share one engine, which is given other addresses for each layer. A context is an engine ready for calls
of one profile; all contexts share their memory, since one runs at a time. A graph keeps what its engines launched, so
each size of graph has contexts of its own, as TensorRT requires, which have run once before they are captured.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from ctypes import c_void_p
from dataclasses import dataclass
from typing import Any

from inferc.arena import ENGINE_ALIGNMENT
from inferc.codegen.tensorrt.adapter import Library
from inferc.config import EngineConfig
from inferc.errors import ConfigError, InfercError
from inferc.manifest import segment_plan
from inferc.manifest_types import Launch
from inferc.runtime.artifact.load import Artifact
from inferc.runtime.runners.cuda.driver import Driver, OutOfMemory
from inferc.runtime.runners.cuda.tensorrt import deserialize, facts_of, library_for

log = logging.getLogger(__name__)

Shapes = Mapping[str, Sequence[Any]]  # per tensor: "tokens" or "rows", followed by its other dimensions
Size = tuple[int, int]  # the tokens and the rows of a step


class NotCapturable(InfercError):
    """The error that an engine cannot be captured in a graph."""


class Engines:
    """The engines of an artifact by name, with their contexts.

    most: per profile, the most tokens or rows of a call. Raises ArtifactError for a plan that TensorRT refuses,
    ConfigError if the device has no memory for it.
    """

    def __init__(
        self, library: Library, plans: Mapping[str, Any], most: Sequence[int], driver: Driver, where: str
    ) -> None:
        self._library, self._driver, self._most = library, driver, tuple(most)
        self._memory: int | None = None
        self._stream = driver.new_stream()
        self._contexts: dict[tuple[str, int], Any] = {}  # key: engine and profile
        self._captured: dict[tuple[str, Size], Any] = {}  # the contexts used in graphs
        self._engines: dict[str, Any] = {}
        try:
            for name, plan in plans.items():
                self._engines[name] = deserialize(library, plan, f"{where}/{segment_plan(name)}")
            self._num_bytes = max(int(engine.device_memory_size_v2) for engine in self._engines.values())
            self._memory = self._take(self._num_bytes)
            for name in self._engines:
                for profile in range(len(self._most)):
                    self._contexts[name, profile] = self._context(name, profile)
        except BaseException:
            self.close()
            raise

    def _take(self, num_bytes: int) -> int:
        try:
            return self._driver.allocate(num_bytes)
        except OutOfMemory:
            raise ConfigError(
                f"{self._driver.name} has no {num_bytes} bytes left, which TensorRT takes beside weights and values"
            ) from None

    def _context(self, name: str, profile: int, *, for_graph: bool = False) -> Any:
        trt, engine = self._library.module, self._engines[name]
        how = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        with self._library.checked(f"TensorRT does not prepare {name}") as checked:
            if for_graph and hasattr(trt, "DynamicShapesKernelSpecializationStrategy"):
                # Compile the kernels for these exact shapes at once. By default TensorRT-RTX uses generic kernels until
                # the specialized ones are compiled, and a graph would keep the generic ones.
                config = checked.made(engine.create_runtime_config())
                config.set_execution_context_allocation_strategy(how)
                config.dynamic_shapes_kernel_specialization_strategy = (
                    trt.DynamicShapesKernelSpecializationStrategy.EAGER
                )
                how = config
            context = checked.made(engine.create_execution_context(how))
            checked.made(context.set_optimization_profile_async(profile, self._stream.value))
            self._driver.wait(self._stream)
            context.set_device_memory(self._memory, self._num_bytes)
        return context

    def _profile(self, size: Size) -> int:
        found = next((index for index, most in enumerate(self._most) if max(size) <= most), None)
        assert found is not None, f"a step of {size} tokens and rows, of at most {self._most}"
        return found

    def prepare(self, calls: Sequence[EngineCall], counts: Mapping[str, int], stream: c_void_p) -> None:
        """Make the contexts for a graph of steps of `counts`. calls: the engine calls of these steps.

        Each engine runs once on whatever its inputs hold. Raises NotCapturable.
        """
        size = _size(counts)
        for call in calls:
            name = call.engine
            if (name, size) not in self._captured:
                context = self._context(name, self._profile(size), for_graph=True)
                self._call(context, call, counts, stream, InfercError)
                if hasattr(context, "is_stream_capturable") and not context.is_stream_capturable(stream.value):
                    raise NotCapturable(f"{self._library.title} does not capture {name}")
                self._captured[name, size] = context

    def run(self, call: EngineCall, counts: Mapping[str, int], stream: c_void_p, *, captured: bool) -> None:
        """Give an engine call to the stream. captured: the call becomes part of a graph, whose contexts `prepare` made.

        Raises InfercError if TensorRT fails, and NotCapturable if it fails while captured.
        """
        size = _size(counts)
        if captured:
            self._call(self._captured[call.engine, size], call, counts, stream, NotCapturable)
        else:
            self._call(self._contexts[call.engine, self._profile(size)], call, counts, stream, InfercError)

    def _call(
        self, context: Any, call: EngineCall, counts: Mapping[str, int], stream: c_void_p, kind: type[InfercError]
    ) -> None:
        with self._library.checked(f"TensorRT failed {call.launch.node}", kind) as checked:
            for name, (first, *rest) in call.given_shapes.items():
                checked.made(context.set_input_shape(name, (counts[f"num_{first}"], *rest)))
            for name, address in call.addresses.items():
                checked.made(context.set_tensor_address(name, address))
            checked.made(context.execute_async_v3(stream.value))

    def close(self) -> None:
        """Free the memory; nothing may be running."""
        self._contexts.clear()
        self._captured.clear()
        self._engines.clear()
        if self._memory is not None:
            self._driver.free(self._memory)
            self._memory = None
        self._driver.call("cuStreamDestroy_v2", self._stream)


@dataclass(frozen=True)
class EngineCall:
    """A call of a segment's engine, bound to addresses. launch: its entry in program.json."""

    launch: Launch
    engine: str
    engines: Engines
    addresses: Mapping[str, int]

    @property
    def given_shapes(self) -> Shapes:
        """The shapes of the inputs; the shapes of the outputs follow from them."""
        return {name: shape for name, shape in self.launch.shapes.items() if not is_output(name)}

    def run(self, stream: c_void_p, counts: Mapping[str, int], *, captured: bool) -> None:
        """Compute the segment, if it has rows."""
        if counts[f"num_{self.launch.rows}"]:
            self.engines.run(self, counts, stream, captured=captured)


def bind_call(launch: Launch, engine: str, engines: Engines | None, addresses: Mapping[str, int]) -> EngineCall:
    assert engines is not None, f"{launch.node} is a call of an engine, and there is none"
    strange = {name: hex(address) for name, address in addresses.items() if address % ENGINE_ALIGNMENT}
    assert not strange, f"{launch.node}: {strange} are no multiples of {ENGINE_ALIGNMENT}"
    return EngineCall(launch, engine, engines, addresses)


def is_output(name: str) -> bool:
    """Return whether a tensor of an engine is an output; outputs are named y0, y1 and so on."""
    return name[0] == "y" and name[1:].isdigit()


def _size(counts: Mapping[str, int]) -> Size:
    return counts["num_tokens"], counts["num_rows"]


def open_engines(artifact: Artifact, config: EngineConfig, driver: Driver) -> Engines:
    """Open the engines of an artifact for the `tensorrt-paged` target.

    Raises ConfigError, UnsupportedError or ArtifactError.
    """
    facts = facts_of(artifact)
    library = library_for(facts, str(artifact.path / "tensorrt"), driver, "tensorrt-paged")
    most = [profile.max_num_tokens for profile in facts.profiles]
    wanted = config.token_budget("tensorrt-paged")
    if wanted > max(most):
        raise ConfigError(
            f"a step of {wanted} tokens: the plans of {artifact.path} take {max(most)}; lower --max-num-batched-tokens"
        )
    plans = {each.name: memoryview(artifact.maps[segment_plan(each.name)]) for each in facts.plans or ()}
    return Engines(library, plans, most, driver, str(artifact.path))
