"""The execution of an artifact's TensorRT plan on a GPU: numpy arrays in and out, K and V in place on the device.

It needs no torch. A plan takes calls within its profiles. Larger calls are cut here: into groups of sequences, or a
prompt into pieces, each of which finds the K and V of the pieces before it in the cache.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferc.codegen.tensorrt.adapter import Library
from inferc.config import EngineConfig, ResolvedEngineConfig
from inferc.errors import ArtifactError, ConfigError, InfercError
from inferc.kv_groups import CacheGroup
from inferc.manifest import TENSORRT_PLAN
from inferc.runtime.artifact.load import Artifact
from inferc.runtime.runners.cuda.driver import Driver, OutOfMemory
from inferc.runtime.runners.cuda.tensorrt import deserialize, facts_of, library_for
from inferc.runtime.runners.dense.caches import cache_inputs
from inferc.runtime.runners.dense.cuda_caches import Rows, device_caches
from inferc.runtime.runners.dense.runner import DenseRunner
from inferc.runtime.step.plan import F32

log = logging.getLogger(__name__)

ROWS, TOKENS, SEQS = "rows", "tokens", "seqs"
INPUTS: dict[str, tuple[str, type[np.generic]]] = {
    "token_ids": (TOKENS, np.int32),
    "positions": (TOKENS, np.int64),
    "starts": (SEQS, np.int64),
    "seq_lens": (SEQS, np.int64),
    "logits_rows": (ROWS, np.int32),
}
Array = NDArray[Any]


@dataclass(frozen=True)
class Profile:
    """The largest call that the plan takes in one of its profiles."""

    max_num_seqs: int
    max_num_tokens: int
    max_num_rows: int


@dataclass(frozen=True)
class Piece:
    """A part of a call that fits a profile.

    first: the index of its first sequence in the whole call; places: the indices of the requested rows that it
    computes.
    """

    profile: int
    first: int
    inputs: dict[str, Array]
    places: NDArray[np.int64]


def pieces_of(inputs: Mapping[str, Array], decode: Profile, prefill: Profile) -> list[Piece]:
    """Split a call's inputs into pieces that fit the profiles.

    Profile 0 is `decode`, with one token per sequence; profile 1 is `prefill`, with one sequence.
    """
    num_seqs, num_tokens = len(inputs["starts"]), len(inputs["token_ids"])
    rows = inputs["logits_rows"].astype(np.int64)
    if num_tokens == num_seqs:
        step = min(decode.max_num_seqs, decode.max_num_rows)
        cuts = [(start, min(start + step, num_seqs)) for start in range(0, num_seqs, step)]
        return [_piece(0, inputs, rows, start, end, start, end) for start, end in cuts]
    assert num_seqs == 1, "several new tokens of several sequences: one call a sequence, see calls_of"
    pieces, start = [], 0
    while start < num_tokens:
        end = min(start + prefill.max_num_tokens, num_tokens)
        within = np.unique(rows[rows >= start])
        if len(within) > prefill.max_num_rows:
            end = min(end, int(within[prefill.max_num_rows]))
        pieces.append(_piece(1, inputs, rows, start, end, 0, 1))
        start = end
    return pieces


def _piece(
    profile: int, inputs: Mapping[str, Array], rows: Array, start: int, end: int, first: int, last: int
) -> Piece:
    """Return the piece with tokens [start, end) of sequences [first, last)."""
    places = np.flatnonzero((rows >= start) & (rows < end))
    positions = inputs["positions"][start:end]
    num_new = (end - start) // (last - first)
    own = {
        "token_ids": inputs["token_ids"][start:end],
        "positions": positions,
        "starts": positions[::num_new],
        "seq_lens": positions[num_new - 1 :: num_new] + 1,
        # A plan computes at least one row; if none was requested, its result is ignored.
        "logits_rows": rows[places] - start if len(places) else np.zeros(1, np.int64),
    }
    return Piece(profile, first, own, places)


class TensorRTModel:
    """The engine of a plan, with one context per profile; the contexts share memory, since one runs at a time."""

    def __init__(
        self,
        library: Library,
        plan: Any,
        where: str,
        profiles: Sequence[Profile],
        caches: Sequence[str],
        hidden_size: int,
        vocab_size: int,
        driver: Driver,
    ) -> None:
        """Open the plan. Raises ArtifactError if TensorRT refuses it.

        plan: its bytes; where: its name, for people.
        """
        self.name = f"{library.title} on {driver.name}"
        self._library, self._driver = library, driver
        self._decode, self._prefill = profiles
        self._closing: list[Callable[[], None]] = []
        try:
            self._open(plan, where, caches)
            self._allocate({"hidden": hidden_size, "logits": vocab_size})
        except BaseException:
            self.release()
            raise

    def _open(self, plan: Any, where: str, caches: Sequence[str]) -> None:
        trt, driver = self._library.module, self._driver
        self._stream = driver.new_stream()
        self._closing.append(lambda: driver.call("cuStreamDestroy_v2", self._stream))
        self._engine: Any = deserialize(self._library, plan, where)
        with self._library.checked(f"{where} does not load", ArtifactError) as checked:
            self._contexts: list[Any] = []
            for index in range(2):
                strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
                context = checked.made(self._engine.create_execution_context(strategy))
                checked.made(context.set_optimization_profile_async(index, self._stream.value))
                self._contexts.append(context)
            driver.wait(self._stream)
        self._closing.append(self._forget)
        for name in caches:
            if self._engine.get_aliased_input_tensor(f"{name}.out") != name:
                raise ArtifactError(f"{where} does not write {name} in place; compile the model again")
        num_bytes = int(self._engine.device_memory_size_v2)
        memory = self._take(num_bytes)
        for context in self._contexts:
            context.set_device_memory(memory, num_bytes)

    def _forget(self) -> None:
        self._contexts = []
        self._engine = None

    def _allocate(self, outputs: Mapping[str, int]) -> None:
        """Allocate memory for the inputs and outputs of the largest calls, on the host and on the device."""
        both = (self._decode, self._prefill)
        most = {
            TOKENS: max(each.max_num_tokens for each in both),
            SEQS: max(each.max_num_seqs for each in both),
            ROWS: max(each.max_num_rows for each in both),
        }
        self._places: dict[str, tuple[int, Array]] = {}  # (address on the device, memory on the host)
        for name, (axis, dtype) in INPUTS.items():
            self._places[name] = self._pair((most[axis],), dtype)
        for name, size in outputs.items():
            self._places[name] = self._pair((most[ROWS], size), np.float32)
        self._outputs = tuple(outputs)

    def _pair(self, shape: tuple[int, ...], dtype: type[np.generic]) -> tuple[int, Array]:
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        memory = self._driver.allocate_host(num_bytes)
        self._closing.append(lambda: self._driver.free_host(memory))
        return self._take(num_bytes), memory[:num_bytes].view(dtype).reshape(shape)

    def _take(self, num_bytes: int) -> int:
        try:
            address = self._driver.allocate(num_bytes)
        except OutOfMemory:
            raise ConfigError(
                f"{self._driver.name} has no {num_bytes} bytes left, which a step of this model takes beside its"
                " weights"
            ) from None
        self._closing.append(lambda: self._driver.free(address))
        return address

    def __call__(self, inputs: Mapping[str, Array], caches: Mapping[str, Rows]) -> tuple[Array, F32]:
        self._driver.enter()
        num_rows = len(inputs["logits_rows"])
        results = [np.empty((num_rows, self._places[name][1].shape[1]), np.float32) for name in self._outputs]
        for piece in pieces_of(inputs, self._decode, self._prefill):
            try:
                self._run(piece, caches)
            except BaseException:
                self._driver.wait(self._stream)  # it may still copy from memory that the next step writes
                raise
            for result, name in zip(results, self._outputs, strict=True):
                result[piece.places] = self._places[name][1][: len(piece.places)]
        hidden, logits = results
        return hidden, logits

    def _run(self, piece: Piece, caches: Mapping[str, Rows]) -> None:
        """Run a piece and leave the results in the host memory."""
        driver, context, stream = self._driver, self._contexts[piece.profile], self._stream
        count = len(piece.inputs["starts"])
        with self._library.checked("TensorRT failed a step", InfercError) as checked:
            for name, array in piece.inputs.items():
                address, memory = self._places[name]
                memory[: len(array)] = array
                driver.copy_in(address, memory.ctypes.data, len(array) * memory.itemsize, stream)
                checked.made(context.set_input_shape(name, (len(array),)))
                checked.made(context.set_tensor_address(name, address))
            for name, rows in caches.items():
                address = rows.address + piece.first * rows.num_bytes
                checked.made(context.set_input_shape(name, (count, *rows.shape)))
                checked.made(context.set_tensor_address(name, address))
                checked.made(context.set_tensor_address(f"{name}.out", address))
            for name in self._outputs:
                checked.made(context.set_tensor_address(name, self._places[name][0]))
            checked.made(context.execute_async_v3(stream.value))
        for name in self._outputs:
            address, memory = self._places[name]
            driver.copy_out(memory.ctypes.data, address, len(piece.places) * memory.shape[1] * memory.itemsize, stream)
        driver.wait(stream)

    def close(self) -> None:
        self._driver.enter()
        self.release()
        self._driver.close()

    def release(self) -> None:
        """Free everything except the driver."""
        while self._closing:
            self._closing.pop()()


# ------------------------------------------------------------------------------------------ from an artifact


def open_tensorrt(
    artifact: Artifact, config: EngineConfig, groups: Sequence[CacheGroup], driver: Driver
) -> tuple[DenseRunner, ResolvedEngineConfig]:
    """Open a runner of an artifact for the `tensorrt` target; it owns the driver once it is made.

    Raises ConfigError, UnsupportedError or ArtifactError if the plan is of another package, version or chip.
    """
    facts = facts_of(artifact)
    where = str(artifact.path / TENSORRT_PLAN)
    library = library_for(facts, where, driver, "tensorrt")
    caches = cache_inputs(artifact)
    hidden_size, vocab_size = int(artifact.program.step.hidden.shape[-1]), artifact.vocab_size
    profiles = [Profile(each.max_num_seqs or 0, each.max_num_tokens, each.max_num_rows) for each in facts.profiles]
    plan = memoryview(artifact.maps[TENSORRT_PLAN])
    names = [each.name for each in caches]
    model = TensorRTModel(library, plan, where, profiles, names, hidden_size, vocab_size, driver)
    try:
        memory, resolved = device_caches(artifact, config, groups, driver, "tensorrt")
    except BaseException:
        model.release()
        raise
    return DenseRunner(model, memory, resolved, artifact.max_model_len, vocab_size), resolved
