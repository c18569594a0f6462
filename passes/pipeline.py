"""Run the passes of a pipeline in order: verify the program after each, dump it, and record how long each pass took."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from inferc.errors import VerifyError
from inferc.ir.program import Program
from inferc.passes.user_passes import UserPass
from inferc.passes.verify import CAPTURED, LOWERED, SERVABLE, check_ops, verify
from inferc.system import env as debug

log = logging.getLogger(__name__)


class Pass(Protocol):
    """A pass that edits a program in place and returns how many rewrites it made."""

    @property
    def name(self) -> str: ...

    def __call__(self, program: Program) -> int: ...


# A callback that sees the program after each pass: (index, pass name or "captured", number of rewrites, program).
Observe = Callable[[int, str, int, Program], None]


@dataclass(frozen=True)
class PassRecord:
    """The log entry of one pass; node counts are of calls and leave out inputs and weights."""

    name: str
    rewrites: int
    seconds: float
    nodes_before: int
    nodes_after: int


OPTIONAL = frozenset(
    {
        "canonicalise",
        "fold_constants",
        "fold_uniform",
        "fuse_rms_norm_wide",
        "fuse_rms_norm",
        "fuse_rms_norm_unscaled",
        "fuse_layer_norm",
        "join_head_norms",
        "fuse_rope",
        "ungroup_heads",
        "absorb_latent",
        "pad_heads",
        "fuse_gelu",
        "fuse_gelu_mul",
        "fuse_silu_mul",
        "fuse_linear_silu_mul",
        "fuse_linear_silu_mul_int8",
        "fuse_moe_routing",
        "fuse_linear_wide",
        "fold_weights",
        "pack_projections",
        "fuse_parallel_residual",
        "fuse_linear_add",
        "fuse_rms_norm_add",
        "fuse_rope_kv_write",
        "fuse_norm_rope_kv_write",
        "fuse_qkv_rope_kv_write",
        "fuse_pointwise",
        "fuse_rms_norm_quantize",
        "fuse_rms_norm_add_quantize",
        "fuse_layer_norm_quantize",
        "fuse_silu_mul_quantize",
    }
)
"""The passes that may rewrite nothing in a valid model, for example because it has another norm or no MoE.

If such a pass was needed and did not match, the ops that it left behind have no kernel, which `choose_kernels` reports.
"""

CHECKPOINTS: dict[str, Any] = {
    "canonicalise": CAPTURED,
    "page_kv_cache": SERVABLE,
    "dense_kv_cache": SERVABLE,
    "choose_kernels": LOWERED,
}
"""The ops that are allowed after a pass, by the name of the pass."""


def run_passes(
    program: Program, passes: tuple[Pass, ...], dump_dir: Path | None = None, observe: Observe | None = None
) -> list[PassRecord]:
    """Run `passes` in order and verify the program after each pass that changed something.

    Writes `00_captured.txt` and one `NN_name.txt` a pass into `dump_dir` (INFERC_DUMP when not given), and calls
    `observe` at the same points.
    Raises VerifyError where a pass breaks the program.
    """
    dump_dir = debug.dump_dir() if dump_dir is None else dump_dir
    own_ops = frozenset(row.op for each in passes if isinstance(each, UserPass) for row in each.kernels)
    records: list[PassRecord] = []
    _dump(program, dump_dir, 0, "captured")
    if observe is not None:
        observe(0, "captured", 0, program)
    for index, each in enumerate(passes, start=1):
        before, start = _num_calls(program), time.perf_counter()
        rewrites = each(program)
        if not rewrites:
            level = logging.INFO if each.name in OPTIONAL else logging.WARNING
            log.log(level, "pass %s rewrote nothing in %s", each.name, program.name)
        _verify(program, each.name, rewrites, own_ops)
        records.append(PassRecord(each.name, rewrites, time.perf_counter() - start, before, _num_calls(program)))
        _dump(program, dump_dir, index, each.name)
        if observe is not None:
            observe(index, each.name, rewrites, program)
        if rewrites and debug.level() >= 3:
            log.info("after %s:\n%s", each.name, program.to_text())
    if debug.level() >= 1:
        log.info("passes of %s:\n%s", program.name, pass_table(records))
    return records


def _verify(program: Program, name: str, rewrites: int, own_ops: frozenset[str]) -> None:
    try:
        if rewrites:
            verify(program)
        if name in CHECKPOINTS:
            check_ops(program, CHECKPOINTS[name], own_ops)
    except VerifyError as error:
        raise VerifyError(f"after {name}: {error}") from error


def _num_calls(program: Program) -> int:
    return sum(node.op == "call_function" for node in program.graph.nodes)


def _dump(program: Program, folder: Path | None, index: int, name: str) -> None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{index:02}_{name}.txt").write_text(program.to_text())


def pass_table(records: list[PassRecord]) -> str:
    """Format the pass log as an aligned text table."""
    lines = [f"{'pass':24} {'rewrites':>8} {'nodes':>13} {'ms':>8}"]
    for record in records:
        nodes = f"{record.nodes_before} > {record.nodes_after}"
        lines.append(f"{record.name:24} {record.rewrites:8} {nodes:>13} {1000 * record.seconds:8.1f}")
    return "\n".join(lines)
