"""Lowering: from a captured program to one whose every node has a kernel, by the pipeline of its target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferc.codegen.kernel import Kernel
from inferc.errors import ConfigError
from inferc.ir.program import Program
from inferc.passes.pipeline import Observe, Pass, PassRecord, run_passes
from inferc.passes.user_passes import UserPass
from inferc.targets import Target


@dataclass(frozen=True)
class LowerConfig:
    """What the passes need to know: the target, the tokens of a KV cache block, the passes of the user, the scheme of
    quantization (a key of SCHEMES), the KV cache's dtype ("int8", anything else is the model's).
    """

    target: Target
    block_size: int = 32
    passes: tuple[UserPass, ...] = ()
    quantize: str | None = None
    kv_dtype: str = "auto"

    @property
    def backend(self) -> Any:
        """The backend class of the target."""
        return self.target.spec.find_backend()

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernel table of this compile, best first: the user's own rows, then the target's."""
        backend = self.backend
        own = (kernel for each in self.passes for kernel in each.kernels if kernel.backend == backend.code)
        return (*own, *backend.kernels)

    @property
    def own_headers(self) -> dict[str, str]:
        """The C++ of the user's kernels: file name to text."""
        return {name: text for each in self.passes for name, text in each.own_headers.items()}


def build_pipeline(config: LowerConfig) -> tuple[Pass, ...]:
    """The passes in running order. Raises ConfigError for a pass of the user's that has no place in it."""
    return _with_own(config.backend(config.target).pipeline(config), config.passes)


def lower(
    program: Program, config: LowerConfig, dump_dir: Path | None = None, observe: Observe | None = None
) -> list[PassRecord]:
    """Turn a captured program into what backends get, in place."""
    return run_passes(program, build_pipeline(config), dump_dir, observe)


def _with_own(ours: tuple[Pass, ...], own: tuple[UserPass, ...]) -> tuple[Pass, ...]:
    """The user's passes each behind the one of ours it names, in the order in which they were given."""
    names = [each.name for each in ours]
    # Behind these, nodes would be left without a kernel, or within no segment.
    last = next(name for name in names if name in ("partition_segments", "choose_kernels"))
    places = names[: names.index(last)]
    for each in own:
        if each.name in names:
            raise ConfigError(f"--pass {each.spec}: inferc has a pass named {each.name}; give yours another name")
        if each.after not in places:
            raise ConfigError(f"--pass {each.spec}: its `after` is {each.after!r}, expected one of {', '.join(places)}")
    return tuple(each for mine in ours for each in (mine, *(user for user in own if user.after == mine.name)))
