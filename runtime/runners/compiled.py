"""The protocols of a compiled model as runners read it: an artifact, or a model that was compiled in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from inferc.arena import MemoryFormula
from inferc.manifest_types import KvGroup, LaunchRecord, Program, StoredWeight
from inferc.runtime.artifact.libraries import Library


class Compiled(Protocol):
    """The facts about a compiled model that runners of every target read."""

    @property
    def program(self) -> Program: ...
    @property
    def weights(self) -> Sequence[StoredWeight]: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_logits(self) -> int:
        """The number of tokens that a row of logits is over: a head may draft some of the vocabulary only."""

    @property
    def kv_groups(self) -> Sequence[KvGroup]: ...
    @property
    def block_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...


class CompiledForCpu(Compiled, Protocol):
    """A compiled model with a library for each of its instruction sets."""

    @property
    def isas(self) -> tuple[str, ...]: ...
    @property
    def memory(self) -> MemoryFormula: ...
    def library(self, isa: str) -> Library: ...
    def view(self, weight: StoredWeight) -> NDArray[Any]: ...


class CompiledForCuda(Compiled, Protocol):
    """A compiled model with folders of kernels for its chips."""

    @property
    def path(self) -> Path: ...
    @property
    def cubins(self) -> Mapping[str, str]:
        """The folder of the kernels, by chip."""

    @property
    def records(self) -> Mapping[str, Sequence[LaunchRecord]]:
        """The launch records of the kernels, by chip."""

    @property
    def contents(self) -> Mapping[str, bytes]:
        """The bytes of the files in these folders, by name."""
