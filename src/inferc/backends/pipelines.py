"""The pass pipelines that several targets share, and the passes that all of them begin with."""

from __future__ import annotations

from inferc.backends.lower import LowerConfig
from inferc.passes.adapters.add_adapters import AddAdapters
from inferc.passes.attention.absorb_latent import AbsorbLatent
from inferc.passes.attention.dense_kv_cache import DenseKVCache
from inferc.passes.attention.pad_heads import PadHeads
from inferc.passes.attention.page_kv_cache import PageKVCache
from inferc.passes.attention.ungroup_heads import UngroupHeads
from inferc.passes.fuse.gelu import fuse_gelu, fuse_gelu_mul
from inferc.passes.fuse.layer_norm import fuse_layer_norm
from inferc.passes.fuse.linear_add import fuse_linear_add, fuse_parallel_residual
from inferc.passes.fuse.linear_fp32_out import fuse_linear_wide
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
from inferc.passes.lower.plan_memory import PlanMemory
from inferc.passes.lower.select_rows import SelectRows
from inferc.passes.lower.split_head import SplitHead
from inferc.passes.normalize.canonicalise import Canonicalise
from inferc.passes.normalize.flatten_batch import FlattenBatch
from inferc.passes.normalize.fold_constants import FoldConstants
from inferc.passes.normalize.fold_uniform import FoldUniform
from inferc.passes.normalize.fold_weights import FoldWeights
from inferc.passes.normalize.join_head_norms import JoinHeadNorms
from inferc.passes.pipeline import Pass
from inferc.passes.quantize.fuse_norm_quantize import (
    fuse_layer_norm_quantize,
    fuse_rms_norm_add_quantize,
    fuse_rms_norm_quantize,
)
from inferc.passes.quantize.fuse_silu_mul_quantize import fuse_silu_mul_quantize
from inferc.passes.quantize.kv_cache import QuantizeKVCache
from inferc.passes.quantize.round_to_nearest import Quantize, Reader
from inferc.passes.quantize.schemes import SCHEMES


def paged_pipeline(config: LowerConfig, *, gated: tuple[Pass, ...] = (), fuses_qkv: bool = True) -> tuple[Pass, ...]:
    """Return the passes of targets whose steps are our own kernels over a paged KV cache.

    gated: the passes that fuse gate and up projections, as far as the target has kernels for them; fuses_qkv: whether
    it has a kernel that fuses the projection of q, k and v with the ops between it and attention.
    """
    own = {row.op for each in config.passes for row in each.kernels}
    return (
        *model_passes(PadHeads()),
        PageKVCache(config.block_size),
        *((QuantizeKVCache(),) if config.kv_dtype == "int8" else ()),  # before cache writes are fused into other ops
        fuse_parallel_residual,  # before fuse_linear_add, which would fuse only one of the two additions
        fuse_linear_add,
        fuse_rms_norm_add,  # for residuals that no projection is added to: experts, norms after a block
        fuse_rope_kv_write,
        fuse_norm_rope_kv_write,
        FusePointwise(),  # fuses the elementwise ops that are left
        SelectRows(config.mtp),  # after the residual is fused, so that the rows are selected behind it
        SplitHead(),
        *(
            (AddAdapters(config.adapter_rank),) if config.adapter_rank else ()
        ),  # before what fuses or quantizes products
        *quantization(config.quantize),  # after split_head, which tells the LM head from the other products
        *(gated if "inferc.silu_mul" not in own else ()),  # not if a user has a kernel for silu_mul, which they remove
        *((FuseQKV(),) if fuses_qkv else ()),  # after quantization, which looks for the products that this pass fuses
        ChooseKernels(config.target, config.kernels),
        PlanMemory(),
    )


def dense_pipeline(config: LowerConfig, *fused: Pass, rows_of: tuple[Reader, ...]) -> tuple[Pass, ...]:
    """Return the passes of runtimes that fuse ops and plan memory by themselves, which get the plain model.

    fused: passes that fuse what the runtime has one op for all the same; rows_of: the products whose rows a scheme
    rounds.
    """
    return (
        *model_passes(),
        DenseKVCache(config.block_size),
        *fused,
        FusePointwise(),
        SelectRows(),
        SplitHead(),
        *quantization_elsewhere(config.quantize, rows_of),
        ChooseKernels(config.target, config.kernels),
    )


def model_passes(*of_heads: Pass) -> tuple[Pass, ...]:
    """Return the passes from the captured program to the ops that models are made of, for any runtime.

    of_heads: passes that only our own attention kernels need.
    """
    return (
        Canonicalise(),
        FoldConstants(),
        FoldUniform(),  # before flatten_batch, which has no rule for tables whose rows are not tokens
        FlattenBatch(),  # before every pattern: they are written over rows of tokens
        fuse_rms_norm_wide,  # before fuse_rms_norm, which would match only the float32 part of this pattern
        fuse_rms_norm,
        fuse_rms_norm_unscaled,  # after the norms with a weight, the first part of which it would match
        fuse_layer_norm,
        JoinHeadNorms(),  # after fuse_layer_norm, whose ops it joins, and before the rotation of the heads
        FuseRope(),
        UngroupHeads(),  # after the rotations, which read the parts of a head together
        AbsorbLatent(),  # after ungroup_heads, which splits the heads of q, K and V
        *of_heads,  # after ungroup_heads and absorb_latent, and before the projections are packed
        fuse_gelu,
        fuse_gelu_mul,
        fuse_silu_mul,
        fuse_linear_wide,  # for the routers
        FoldWeights(),  # after fuse_linear_wide, which matches weights that are cast in the graph
        FuseMoERouting(),
        PackProjections(),  # after the routing, which keeps routers out of the packing
    )


def quantization(name: str | None) -> tuple[Pass, ...]:
    """Return the passes that quantize by the scheme of this name, for products by our own kernels."""
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


def quantization_elsewhere(name: str | None, rows_of: tuple[Reader, ...]) -> tuple[Pass, ...]:
    """Return the pass that quantizes for onnxruntime or TensorRT, where only the products `rows_of` read rounded rows.

    No product of experts reads them there.
    """
    return () if name is None else (Quantize(SCHEMES[name], rows_of=rows_of),)
