"""The lowering of a captured program to one whose every node has a kernel, by the pipeline of its target."""

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
    """The settings that the passes need.

    block_size: the tokens of a KV cache block; passes: those of the user; quantize: the quantization scheme (a key of
    SCHEMES); kv_dtype: the dtype of the KV cache ("int8"; anything else means the model's); adapter_rank: the largest
    rank of the LoRA adapters that a step has room for, 0 for none; mtp: whether MTP layers read what the LM head reads.
    """

    target: Target
    block_size: int = 32
    passes: tuple[UserPass, ...] = ()
    quantize: str | None = None
    kv_dtype: str = "auto"
    adapter_rank: int = 0
    mtp: bool = False

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
        """The C++ headers of the user's kernels, file name to text."""
        return {name: text for each in self.passes for name, text in each.own_headers.items()}


def build_pipeline(config: LowerConfig) -> tuple[Pass, ...]:
    """Return the passes in running order; raise ConfigError for a user's pass that has no place among them."""
    return _with_own(config.backend(config.target).pipeline(config), config.passes)


def lower(
    program: Program, config: LowerConfig, dump_dir: Path | None = None, observe: Observe | None = None
) -> list[PassRecord]:
    """Lower a captured program in place to what backends write."""
    return run_passes(program, build_pipeline(config), dump_dir, observe)


def _with_own(ours: tuple[Pass, ...], own: tuple[UserPass, ...]) -> tuple[Pass, ...]:
    """Insert each of the user's passes after the built-in pass that it names, in the order in which they were given."""
    names = [each.name for each in ours]
    # After these passes, a new node would be left without a kernel, or in no segment.
    last = next(name for name in names if name in ("partition_segments", "choose_kernels"))
    places = names[: names.index(last)]
    for each in own:
        if each.name in names:
            raise ConfigError(f"--pass {each.spec}: inferc has a pass named {each.name}; give yours another name")
        if each.after not in places:
            raise ConfigError(f"--pass {each.spec}: its `after` is {each.after!r}, expected one of {', '.join(places)}")
    return tuple(each for mine in ours for each in (mine, *(user for user in own if user.after == mine.name)))
