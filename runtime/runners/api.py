"""The contracts of runners: what a runner does, what it can do, and the factory that opens one for an artifact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from numpy.typing import NDArray

from inferc.config import EngineConfig, ResolvedEngineConfig
from inferc.kv_groups import CacheGroup
from inferc.manifest_types import Observable
from inferc.runtime.artifact.load import Artifact
from inferc.runtime.offload.manager import BlockMover
from inferc.runtime.runners.nodes import Node
from inferc.runtime.step.plan import F32, I32, StepPlan, StepResult
from inferc.targets import find_spec

Capability = Literal[
    "adapters",  # rows may have LoRA adapters, which are loaded and unloaded between steps (runtime/adapters)
    "drafts",  # a step samples several rows of a sequence whose tokens were drafted
    "draft_trees",  # several tokens may be drafted for one place (StepTree)
    "grammars",  # rows may choose among some tokens only, by a mask of bits (StepMasks)
    "heads",  # its steps show the rows that a head reads, and such heads run on it
    "kv_disk",  # KV blocks move to the offload tier and back
    "kv_evict",  # a sequence may free blocks outside its attention while it runs
    "kv_evict_heavy_hitters",  # attention mass is accumulated per block
    "kv_events",  # blocks are identified by their hash, and changes to them are published as events
    "logits_processors",  # functions of a request change its logits before they are sampled (StepPlan.processed)
    "observe",  # a function is given chosen values of every step (ObservingRunner)
    "offload_in_place",  # steps read blocks of the offload tier without copying them first
    "partial_blocks",  # slots can be copied, so a shared prefix may end within a block
    "prefix_cache",  # sequences share blocks
    "record",  # the same requests give the same bits again, so runs can be recorded and replayed
    "taps",  # the values of chosen nodes can be copied out of a step (TappingRunner)
    "threads",  # its kernels and threads can be chosen: --isa, --pin
    "vectors",  # the hidden rows before the LM head can be read, for text embeddings (EmbeddingRunner)
]
"""A feature that a runner may support beyond running steps."""

Observer = Callable[[Observable, int, NDArray[Any]], None]
"""A function that is given a value of a step: its row of `observable`, the layer, and the rows [rows, width]."""


class Runner(Protocol):
    """The interface of a runner, which executes steps: the compiled model, its reference, or a test's fake.

    Steps run in the order of `submit`. A step begins only when the step before it is done, because KV blocks change
    owner between two steps. A slot is reset only while no step in flight uses it.
    """

    def submit(self, plan: StepPlan) -> None: ...

    def wait(self) -> StepResult:
        """Return the result of the oldest step that was submitted and not yet waited for."""

    def reset_slot(self, slot: int, prompt_ids: I32 | None, output_ids: I32 | None = None) -> None:
        """Assign `slot` to a new sequence: start its penalty counts from these ids (None: it has no penalties)."""

    def score(self, plan: StepPlan, target_ids: I32) -> tuple[F32, I32]:
        """Return, for each logits row, the log probability of its target id, and the most likely id.

        No step may be in flight.
        """

    def close(self) -> None: ...


@runtime_checkable
class ObservableRunner(Runner, Protocol):
    """A runner whose logits can be observed while it scores; certificates are made from them."""

    @property
    def name(self) -> str:
        """The name of what computes the steps, for people: `cpu kernels (avx2)`."""

    def watch_logits(self, sink: Callable[[F32], None] | None) -> None:
        """Pass `sink` the float32 logits [rows, vocab_size] of every step that scores; None stops it."""


@runtime_checkable
class ObservingRunner(Runner, Protocol):
    """A runner that shows the values of its steps while they run."""

    def set_observer(self, observer: Observer | None) -> None:
        """Pass `observer` every value that compiled code shows; None stops it."""


@runtime_checkable
class TappingRunner(Runner, Protocol):
    """A runner that copies the values of chosen nodes for the sequences that ask for it."""

    def set_taps(self, nodes: Sequence[Node]) -> None:
        """Choose the nodes, once, before the first step."""


class HeadRunner(Runner, Protocol):
    """A runner of a head that drafts, whose steps read rows of another model."""

    def submit(self, plan: StepPlan, hidden: Any = None) -> None:
        """Queue a step. hidden: what the head reads beside each token, in the form that `RowSource` makes for it."""


@runtime_checkable
class KeepingRunner(Runner, Protocol):
    """A runner whose steps leave the rows that a head reads on its device (`StepResult.kept`)."""

    @property
    def row_store(self) -> Any:
        """The store that has the rows, for the runner of the head (`RunnerRequest.row_store`); None without a head."""


@runtime_checkable
class EmbeddingRunner(Protocol):
    """A runner that returns hidden rows, of which vectors of texts are made."""

    def embed(self, plan: StepPlan) -> F32:
        """Run a step and return the hidden rows [S, hidden_size] of its logits rows; no step may be in flight."""


@dataclass(frozen=True)
class OpenedRunner:
    """An open runner, with its resolved configuration and its optional parts.

    - computed_by: the instruction set or chip that determines the bits of its results.
    - mover, num_offloaded: what moves blocks to its offload tier and back, and the tier's number of blocks by KV group.
    - share_free_slots: takes the scheduler's list of slots that no sequence uses.
    - idle_work: does a piece of useful work while no request is running, and returns whether more is left.
    """

    runner: Runner
    config: ResolvedEngineConfig
    computed_by: str = ""
    mover: BlockMover | None = None
    num_offloaded: tuple[int, ...] = ()
    share_free_slots: Callable[[Sequence[int]], None] | None = None
    idle_work: Callable[[], bool] | None = None


@dataclass(frozen=True)
class RunnerRequest:
    """The arguments for opening a runner.

    weights_checked: a function that returns once every byte of the weights was verified.
    beside: the request of a runner that is opened afterwards in the same memory, with as many KV blocks.
    row_store: where the rows are that a head reads, if the runner of its model is a `KeepingRunner`.
    """

    artifact: Artifact
    target: str
    config: EngineConfig
    groups: tuple[CacheGroup, ...]
    weights_checked: Callable[[], Any]
    beside: RunnerRequest | None = None
    row_store: Any = None


def capabilities_of(artifact: Artifact, target: str | None = None) -> frozenset[Capability]:
    """Return what the runner of an artifact can do for one of its targets, by default the first."""
    factory: RunnerFactory = find_spec(target or artifact.manifest.targets[0]).find_runner()
    return factory.capabilities(artifact)


class RunnerFactory(Protocol):
    """A factory that opens the runner of one target; the target's row in inferc.targets names it."""

    def capabilities(self, artifact: Artifact) -> frozenset[Capability]:
        """Return the capabilities of the runner of this artifact, before the runner is opened."""

    def open(self, request: RunnerRequest) -> OpenedRunner:
        """Open a runner for the request.

        Raises ConfigError, UnsupportedError or ArtifactError, and then leaves nothing open.
        """
