"""Which passes run, in which order, and the running: checks, dumps, timings."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from inferc.codegen.kernels import KERNELS, Kernel
from inferc.codegen.target import Target
from inferc.errors import ConfigError, VerifyError
from inferc.ir.program import Program
from inferc.passes.attention.absorb_latent import AbsorbLatent
from inferc.passes.attention.dense_kv_cache import DenseKVCache
from inferc.passes.attention.pad_heads import PadHeads
from inferc.passes.attention.page_kv_cache import PageKVCache
from inferc.passes.attention.ungroup_heads import UngroupHeads
from inferc.passes.fuse.dense_attention import fuse_dense_attention
from inferc.passes.fuse.gelu import fuse_gelu, fuse_gelu_mul
from inferc.passes.fuse.layer_norm import fuse_layer_norm
from inferc.passes.fuse.linear_add import fuse_linear_add, fuse_parallel_residual
from inferc.passes.fuse.linear_fp32_out import fuse_linear_wide
from inferc.passes.fuse.linear_silu_mul import fuse_linear_silu_mul, fuse_linear_silu_mul_int8
from inferc.passes.fuse.moe_routing import FuseMoERouting
from inferc.passes.fuse.pack_projections import PackProjections
from inferc.passes.fuse.pointwise import FusePointwise
from inferc.passes.fuse.qkv_rope_kv_write import FuseQKV
from inferc.passes.fuse.rms_norm import fuse_rms_norm, fuse_rms_norm_unscaled, fuse_rms_norm_wide
from inferc.passes.fuse.rms_norm_add import fuse_rms_norm_add
from inferc.passes.fuse.rope import FuseRope
from inferc.passes.fuse.rope_kv_write import fuse_norm_rope_kv_write, fuse_rope_kv_write
from inferc.passes.fuse.silu_mul import fuse_silu_mul
from inferc.passes.lower.choose_kernels import ChooseKernels
from inferc.passes.lower.partition_segments import PartitionSegments
from inferc.passes.lower.plan_memory import PlanMemory
from inferc.passes.lower.select_rows import SelectRows
from inferc.passes.lower.split_head import SplitHead
from inferc.passes.normalize.canonicalise import Canonicalise
from inferc.passes.normalize.flatten_batch import FlattenBatch
from inferc.passes.normalize.fold_constants import FoldConstants
from inferc.passes.normalize.fold_uniform import FoldUniform
from inferc.passes.normalize.fold_weights import FoldWeights
from inferc.passes.normalize.join_head_norms import JoinHeadNorms
from inferc.passes.quantize.fuse_norm_quantize import (
    fuse_layer_norm_quantize,
    fuse_rms_norm_add_quantize,
    fuse_rms_norm_quantize,
)
from inferc.passes.quantize.fuse_silu_mul_quantize import fuse_silu_mul_quantize
from inferc.passes.quantize.kv_cache import QuantizeKVCache
from inferc.passes.quantize.round_to_nearest import Quantize, Reader
from inferc.passes.quantize.schemes import SCHEMES
from inferc.passes.user_passes import UserPass
from inferc.passes.verify import CAPTURED, LOWERED, SERVABLE, check_ops, verify
from inferc.system import env as debug

log = logging.getLogger(__name__)


class Pass(Protocol):
    """Edits a program in place and returns how many rewrites it made."""

    @property
    def name(self) -> str: ...

    def __call__(self, program: Program) -> int: ...


# Sees the program after a pass: (index, name of the pass or "captured", its rewrites, the program).
Observe = Callable[[int, str, int, Program], None]


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
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernel table of this compile, best first: the user's own rows, then ours."""
        return (*(kernel for each in self.passes for kernel in each.kernels), *KERNELS)

    @property
    def own_headers(self) -> dict[str, str]:
        """The C++ of the user's kernels: file name to text."""
        return {name: text for each in self.passes for name, text in each.own_headers.items()}


@dataclass(frozen=True)
class PassRecord:
    """One line of the pass log; nodes count calls, not inputs and weights."""

    name: str
    rewrites: int
    seconds: float
    nodes_before: int
    nodes_after: int


def build_pipeline(config: LowerConfig) -> tuple[Pass, ...]:
    """The passes in running order. Raises ConfigError for a pass of the user's that has no place in it."""
    return _with_own(_our_pipeline(config), config.passes)


def _our_pipeline(config: LowerConfig) -> tuple[Pass, ...]:
    if config.target.has_dense_cache:
        return _dense_pipeline(config)
    if config.target.has_segments:
        return _segments_pipeline(config)
    return (
        *_model_passes(PadHeads()),
        PageKVCache(config.block_size),
        *((QuantizeKVCache(),) if config.kv_dtype == "int8" else ()),  # before its writes are fused into other ops
        fuse_parallel_residual,  # before fuse_linear_add, which would take one of the two
        fuse_linear_add,
        fuse_rms_norm_add,  # of the residuals that no projection is added to: experts, norms behind a block
        fuse_rope_kv_write,
        fuse_norm_rope_kv_write,
        FusePointwise(),  # what is left
        SelectRows(),  # after the residual is fused, which it then follows
        SplitHead(),
        *_quantization(config.quantize),  # after split_head, which tells the LM head from the other products
        *_gated_products(config),
        # After the quantization, which looks for products: it takes those in too. A GPU's kernel writes no int8 cache.
        *((FuseQKV(),) if config.target.device != "cuda" or config.kv_dtype != "int8" else ()),
        ChooseKernels(config.target, config.kernels),
        PlanMemory(),
    )


def _dense_pipeline(config: LowerConfig) -> tuple[Pass, ...]:
    """For runtimes that fuse ops by themselves, and plan their memory: what they are told is the plain model."""
    return (
        *_model_passes(),
        DenseKVCache(config.block_size),
        *((fuse_dense_attention,) if config.target.device == "onnx" and not config.target.is_standard else ()),
        FusePointwise(),
        SelectRows(),
        SplitHead(),
        *_quantization_elsewhere(config),
        ChooseKernels(config.target, config.kernels),
    )


def _segments_pipeline(config: LowerConfig) -> tuple[Pass, ...]:
    """The plain model, as TensorRT fuses ops by itself, but for what the kernels between its segments do at once."""
    return (
        *_model_passes(PadHeads()),
        PageKVCache(config.block_size),
        *((QuantizeKVCache(),) if config.kv_dtype == "int8" else ()),
        fuse_rope_kv_write,
        fuse_norm_rope_kv_write,
        FusePointwise(),
        SelectRows(),
        SplitHead(),
        *_quantization_elsewhere(config),
        PartitionSegments(),  # after everything that makes or moves a node
        ChooseKernels(config.target, config.kernels),
        PlanMemory(),
    )


def _model_passes(*of_heads: Pass) -> tuple[Pass, ...]:
    """From what was captured to the ops that models are made of, whatever runs them; `of_heads` is for our own attention."""
    return (
        Canonicalise(),
        FoldConstants(),
        FoldUniform(),  # before flatten_batch, which has no rule for a table of what is no token
        FlattenBatch(),  # before every pattern: they are written over rows of tokens
        fuse_rms_norm_wide,  # before fuse_rms_norm, which matches the float32 part of what this one matches whole
        fuse_rms_norm,
        fuse_rms_norm_unscaled,  # after the norms that multiply by a weight, whose first part it matches
        fuse_layer_norm,
        JoinHeadNorms(),  # after fuse_layer_norm, whose ops it joins, and before the rotation of their heads
        FuseRope(),
        UngroupHeads(),  # after the rotations, which read the parts of a head together
        AbsorbLatent(),  # after ungroup_heads, which parts the heads of q, K and V
        *of_heads,  # after both, and before the projections are packed
        fuse_gelu,
        fuse_gelu_mul,
        fuse_silu_mul,
        fuse_linear_wide,  # of the routers
        FoldWeights(),  # after fuse_linear_wide, whose weights are cast in the graph
        FuseMoERouting(),
        PackProjections(),  # after the routing, which keeps routers out of the packing
    )


def _gated_products(config: LowerConfig) -> tuple[Pass, ...]:
    """Of weights for which `linear_silu_mul` has a kernel, unless the user has one for what it would take in."""
    own = {row.op for each in config.passes for row in each.kernels}
    if config.target.device == "reference" or "inferc.silu_mul" in own:
        return ()
    of_int8 = config.target.device == "cuda" and config.quantize == "int8"
    return (fuse_linear_silu_mul, *((fuse_linear_silu_mul_int8,) if of_int8 else ()))


def _quantization(name: str | None) -> tuple[Pass, ...]:
    if name is None:
        return ()
    scheme = SCHEMES[name]
    if not scheme.quantizes_rows:
        return (Quantize(scheme),)
    return (
        Quantize(scheme),
        fuse_rms_norm_quantize,
        fuse_rms_norm_add_quantize,
        fuse_layer_norm_quantize,
        fuse_silu_mul_quantize,
    )


def _quantization_elsewhere(config: LowerConfig) -> tuple[Pass, ...]:
    """For runtimes that read rounded rows in some products alone, and of experts in none."""
    if config.quantize is None:
        return ()
    scheme = SCHEMES[config.quantize]
    rows_of: tuple[Reader, ...] = ("linear", "head")
    if config.target.spec == "onnx:cuda":
        rows_of = ()
    elif scheme.group:  # onnxruntime's kernels for four bits round rows by themselves, each block by its own scale
        rows_of = ("head",)
    elif config.target.has_segments:  # behind which the LM head is a kernel of ours, that reads rows in floats
        rows_of = ("linear",)
    return (Quantize(scheme, rows_of=rows_of),)


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
"""Passes of the pipeline whose pattern a fine model may do without: another norm, no residual in front of one, no MoE.

What they were needed for and did not find has no kernel, which `choose_kernels` says.
"""

CHECKPOINTS: dict[str, Any] = {
    "canonicalise": CAPTURED,
    "page_kv_cache": SERVABLE,
    "dense_kv_cache": SERVABLE,
    "choose_kernels": LOWERED,
}
"""The ops allowed once a pass is done."""


def lower(
    program: Program, config: LowerConfig, dump_dir: Path | None = None, observe: Observe | None = None
) -> list[PassRecord]:
    """Turn a captured program into what backends get, in place."""
    return run_passes(program, build_pipeline(config), dump_dir, observe)


def run_passes(
    program: Program, passes: tuple[Pass, ...], dump_dir: Path | None = None, observe: Observe | None = None
) -> list[PassRecord]:
    """Run `passes` in order, verifying after each that changed something.

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
    """The pass log as aligned text."""
    lines = [f"{'pass':24} {'rewrites':>8} {'nodes':>13} {'ms':>8}"]
    for record in records:
        nodes = f"{record.nodes_before} > {record.nodes_after}"
        lines.append(f"{record.name:24} {record.rewrites:8} {nodes:>13} {1000 * record.seconds:8.1f}")
    return "\n".join(lines)
