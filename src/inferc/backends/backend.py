"""The contract of a backend, which compiles a model for one target.

A row of `inferc.targets.TARGETS` names each target's backend. No other part of the compiler knows a target's name.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

from inferc.arena import MemoryFormula, MemoryPlan
from inferc.backends.lower import LowerConfig
from inferc.backends.partition import RankProgram
from inferc.codegen.artifact_writer import ArtifactWriter
from inferc.codegen.kernel import Kernel
from inferc.errors import ConfigError
from inferc.ir.program import Program
from inferc.manifest_types import KernelRow, PlainPart, TargetPart, Tensorrt
from inferc.manifest_types import Program as ProgramJson
from inferc.passes.lower.plan_memory import NO_PLAN
from inferc.passes.pipeline import Pass
from inferc.system.progress import Progress
from inferc.targets import Target


@dataclass
class Output:
    """The facts of a compile that a backend gets to write its part.

    folder: where the artifact is written; num_ranks: for how many programs `write` is called; for_here: whether only
    this machine will run it, so that code for others need not be made.
    """

    writer: ArtifactWriter
    folder: Path
    config: LowerConfig
    report: Progress
    num_ranks: int = 1
    for_here: bool = False


@dataclass(frozen=True)
class Written:
    """The result of a backend's `write` for one rank, as the manifest and program.json record it.

    plan: where values lie in the arena; arena: its size as a formula; part: what is added to program.json; libraries,
    cubins: files by instruction set and by chip; kernels: rows of the kernel table besides those of the graph;
    tensorrt: what the manifest says of TensorRT engines.
    """

    plan: MemoryPlan = NO_PLAN
    arena: MemoryFormula = NO_PLAN.formula
    part: TargetPart = PlainPart()  # noqa: RUF009 (frozen)
    libraries: dict[str, str] = field(default_factory=dict)
    cubins: dict[str, str] = field(default_factory=dict)
    kernels: list[KernelRow] = field(default_factory=list)
    tensorrt: Tensorrt | None = None


class Backend(Protocol):
    """The part of a compile that depends on the target.

    An instance is made for each compile and may keep what its ranks share.
    """

    code: ClassVar[str]
    """The language of its kernels, the value of `backend` in their rows."""
    kernels: ClassVar[tuple[Kernel, ...]]
    """The kernel table, best first."""

    def __init__(self, target: Target) -> None: ...

    def check_machine(self) -> None:
        """Raise ConfigError for what this machine lacks to compile for the target, besides the packages of its row."""

    def pipeline(self, config: LowerConfig) -> tuple[Pass, ...]:
        """Return the passes, in running order, that turn a captured program into one that this backend writes."""

    def try_write(self, program: Program, config: LowerConfig) -> None:
        """Raise what `write` would refuse of a lowered program, as far as that is cheap to tell, and write nothing."""

    def write(self, rank: RankProgram, output: Output) -> Written:
        """Write the code of a lowered program into the artifact, whose weights are already written."""


@runtime_checkable
class EarlyBackend(Backend, Protocol):
    """A backend that can begin with the code of lowered programs while these are still being checked."""

    def begin(self, ranks: Sequence[RankProgram], output: Output) -> None:
        """Begin, in the background, what `write` will need of these programs; a failure is left to `write`."""


class ExtendableBackend(Backend, Protocol):
    """A backend that adds code for more chips to a finished artifact: that of a target with `more_targets`."""

    def add(self, program: Program, compiled: ProgramJson, writer: ArtifactWriter, report: Progress) -> Written | None:
        """Write the code of an artifact's program for the chips of this backend's target.

        program: the artifact's lowered program; compiled: its program.json. Returns None, having written nothing, if
        that was made by kernels other than this backend's.
        """


def open_backend(target: Target) -> Backend:
    """Return the backend of a target after checking that this machine can compile for it.

    Raises ConfigError for a package or a tool that is missing, UnsupportedError for a chip that it cannot compile for.
    """
    spec = target.spec
    missing = [name for name in spec.packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"target {target} needs {', '.join(missing)}; install: pip install 'inferc[{spec.extra}]'")
    backend: Backend = spec.find_backend()(target)
    backend.check_machine()
    return backend
