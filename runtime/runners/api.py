"""The contracts of what runs steps: a runner, what it can do, and the factory that opens one for an artifact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from inferc.config import EngineConfig, ResolvedEngineConfig
from inferc.kv_groups import CacheGroup
from inferc.runtime.artifact.load import Artifact
from inferc.runtime.offload.disk import DiskTier
from inferc.runtime.step.plan import F32, I32, StepPlan, StepResult

Capability = Literal[
    "kv_disk",  # blocks go to the offload tier and come back
    "kv_evict",  # a sequence may give blocks back that it no longer sees
    "kv_evict_heavy_hitters",  # attention is counted by block
    "kv_events",  # blocks are found by their hash, and told of
    "offload_in_place",  # steps read the offload tier where it lies
    "partial_blocks",  # slots are copied, so that a prefix may end within a block
    "prefix_cache",  # sequences share blocks
    "record",  # the same requests give the same bits again
    "taps",  # the values of chosen nodes are copied
    "threads",  # its kernels and threads are ours to choose: --isa, --pin
    "vectors",  # the rows in front of the LM head are read, for vectors of texts
]
"""What a runner can do beyond steps."""


class Runner(Protocol):
    """What runs steps: the compiled model, its reference, or a test's fake.

    Steps run in the order of `submit`, and a step begins when the one before it is done: blocks pass from one sequence
    to another between two steps. A slot is reset when no step in flight has it.
    """

    def submit(self, plan: StepPlan) -> None: ...

    def wait(self) -> StepResult:
        """The result of the oldest step that was submitted and not yet waited for."""

    def reset_slot(self, slot: int, prompt_ids: I32 | None, output_ids: I32 | None = None) -> None:
        """A sequence gets `slot`: start its penalty counts from these ids (None: it has no penalties)."""

    def score(self, plan: StepPlan, target_ids: I32) -> tuple[F32, I32]:
        """Log probability of a target id per logits row, and the most likely id. No step is in flight."""

    def close(self) -> None: ...


@runtime_checkable
class ObservableRunner(Runner, Protocol):
    """A runner whose logits are seen as they are scored, which certificates are made of."""

    @property
    def name(self) -> str:
        """What computes the steps, for people: `cpu kernels (avx2)`."""

    def watch_logits(self, sink: Callable[[F32], None] | None) -> None:
        """Give `sink` the logits float32 [rows, vocab_size] of every step that scores; None ends it."""


@dataclass(frozen=True)
class OpenedRunner:
    """A runner at work, and what belongs to it.

    computed_by: the instruction set or chip that decides the bits; disk: its offload tier; share_free_slots: takes the
    scheduler's list of slots that no sequence has; idle_work: does something useful while there is nothing to do, and says
    whether there is more.
    """

    runner: Runner
    config: ResolvedEngineConfig
    computed_by: str = ""
    disk: DiskTier | None = None
    share_free_slots: Callable[[Sequence[int]], None] | None = None
    idle_work: Callable[[], bool] | None = None


@dataclass(frozen=True)
class RunnerRequest:
    """What a runner is opened for. weights_checked: returns once every byte of the weights was found to be right."""

    artifact: Artifact
    target: str
    config: EngineConfig
    groups: tuple[CacheGroup, ...]
    weights_checked: Callable[[], Any]


class RunnerFactory(Protocol):
    """Opens the runner of one target; the row of the target names it (inferc.targets)."""

    def capabilities(self, artifact: Artifact) -> frozenset[Capability]:
        """What the runner of this artifact can do, asked before it is opened."""

    def open(self, request: RunnerRequest) -> OpenedRunner:
        """Raises ConfigError, UnsupportedError or ArtifactError; nothing is left open then."""
