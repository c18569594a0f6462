"""The lowering of a program for several ranks: first the passes up to packing, once, then the rest for each rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from inferc.backends.lower import LowerConfig, build_pipeline, lower
from inferc.errors import ConfigError
from inferc.ir.program import Program
from inferc.passes.parallel.expert_placement import Placement
from inferc.passes.parallel.partition_experts import Exchange, partition_experts
from inferc.passes.parallel.shard import shard
from inferc.passes.pipeline import Observe, Pass, PassRecord, run_passes
from inferc.passes.verify import verify
from inferc.system import env as debug

PARTITION_BEFORE = "pack_projections"
"""The pass before which a program is split. Rows of packed projections could not be split without telling them apart
again, and residuals are fused after the sums over ranks are in place."""
LAST_STAGE = ("select_rows", "split_head")
"""The passes of the LM head, which only the last pipeline stage has."""


@dataclass(frozen=True)
class Ranks:
    """The numbers of ranks that a model is spread over."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    placements: Mapping[int, Placement] = field(default_factory=dict)  # the placement of experts, by layer
    exchange: Exchange = "all_to_all"

    @property
    def count(self) -> int:
        return self.tp * self.pp * self.ep

    def label(self, tp_rank: int, pp_stage: int, ep_rank: int) -> str:
        """Return a short name of one rank, made of the sizes that are not 1: `tp1-pp0`."""
        places = (("tp", self.tp, tp_rank), ("pp", self.pp, pp_stage), ("ep", self.ep, ep_rank))
        return "-".join(f"{name}{rank}" for name, size, rank in places if size > 1)

    def __post_init__(self) -> None:
        for name, size in (("tp", self.tp), ("pp", self.pp), ("ep", self.ep)):
            if size < 1:
                raise ConfigError(f"--{name} {size}: expected 1 or more")
        if self.tp > 1 and self.ep > 1:
            raise ConfigError(f"--tp {self.tp} with --ep {self.ep}: expected one of them to be 1")


@dataclass(frozen=True)
class RankProgram:
    """The lowered program of one rank."""

    program: Program = field(repr=False)
    tp_rank: int
    pp_stage: int
    ep_rank: int = 0
    label: str = ""
    records: list[PassRecord] = field(default_factory=list, repr=False)  # the records of the passes after the partition

    @property
    def prefix(self) -> str:
        """The prefix of its weights' names where those of all ranks are stored together."""
        return f"{self.label}:" if self.label else ""


def by_stage(ranks: Sequence[RankProgram]) -> list[list[Program]]:
    """Return the programs of all ranks by pipeline stage, as `run_partitioned` takes them."""
    last = max(each.pp_stage for each in ranks)
    return [[each.program for each in ranks if each.pp_stage == stage] for stage in range(last + 1)]


def lower_ranks(
    program: Program, config: LowerConfig, ranks: Ranks, observe: Observe | None = None
) -> list[RankProgram]:
    """Lower a captured program for all ranks and return their programs; it is itself lowered up to the partition.

    A single rank's program is the given one, lowered as a whole. observe: sees the passes in front of the partition.
    """
    if ranks.count == 1:
        records = lower(program, config, observe=observe)
        return [RankProgram(program, 0, 0, records=records)]
    prepare(program, config, observe)
    return partition(program, config, ranks)


def prepare(program: Program, config: LowerConfig, observe: Observe | None = None) -> list[PassRecord]:
    """Run the passes before the partition, in place."""
    return run_passes(program, _passes(config)[0], observe=observe)


def partition(
    program: Program, config: LowerConfig, ranks: Ranks, observe: Callable[[str], Observe | None] | None = None
) -> list[RankProgram]:
    """Split a prepared program, which stays as it is, and lower each rank's; ordered by ep rank, stage, tp rank.

    observe: returns the observer for the passes of the rank with the given label. The first row that it sees is the
    partition, in place of "captured".
    """
    made = []
    of_experts = [program] if ranks.ep == 1 else partition_experts(program, ranks.ep, ranks.placements, ranks.exchange)
    for ep_rank, by_expert in enumerate(of_experts):
        for stage, programs in enumerate(shard(by_expert, ranks.tp, ranks.pp)):
            last = stage + 1 == ranks.pp
            passes = tuple(each for each in _passes(config)[1] if last or each.name not in LAST_STAGE)
            for tp_rank, own in enumerate(programs):
                label = ranks.label(tp_rank, stage, ep_rank)
                verify(own)
                dump_dir = debug.dump_dir()
                records = run_passes(
                    own,
                    passes,
                    None if dump_dir is None else dump_dir / label,
                    None if observe is None else observe(label),
                )
                made.append(RankProgram(own, tp_rank, stage, ep_rank, label, records))
    return made


def _passes(config: LowerConfig) -> tuple[tuple[Pass, ...], tuple[Pass, ...]]:
    passes = build_pipeline(config)
    at = [each.name for each in passes].index(PARTITION_BEFORE)
    return passes[:at], passes[at:]
