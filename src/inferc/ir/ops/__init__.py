"""The `inferc` ops, each with a schema, a reference implementation in PyTorch and a fake kernel.

The reference defines what is correct for every backend. Rows are tokens, `[num_tokens, …]`, without a batch axis;
the exception is the captured form of `attention`, which gets the tensors in the shapes that the Hugging Face model
makes.
"""

from inferc.ir.ops.attention import (
    attention,
    cached_head_dim,
    kv_write,
    kv_write_in_place,
    latent_attention,
    latent_write,
    latent_write_in_place,
    norm_rope_kv_write,
    norm_rope_kv_write_in_place,
    paged_attention,
    rope_kv_write,
    rope_kv_write_in_place,
    visible,
)
from inferc.ir.ops.collectives import (
    all_gather,
    all_reduce,
    expert_choose,
    expert_combine,
    expert_dispatch,
    joined,
    run_ranks,
)
from inferc.ir.ops.dense import (
    dense_attention,
    dense_latent_attention,
    dense_write,
    dense_write_attention,
    dense_write_attention_in_place,
    dense_write_in_place,
)
from inferc.ir.ops.elementwise import gelu_mul, silu_mul
from inferc.ir.ops.experts import moe_experts, moe_routing
from inferc.ir.ops.heads import resize_heads
from inferc.ir.ops.linear import head_linear, linear_add, linear_silu_mul, linear_wide, lm_head
from inferc.ir.ops.lora import lora_expand, lora_lookup, lora_shrink
from inferc.ir.ops.norms import layer_norm, rms_norm, rms_norm_add
from inferc.ir.ops.pointwise import pointwise
from inferc.ir.ops.qkv import qkv_rope_kv_write, qkv_rope_kv_write_in_place
from inferc.ir.ops.quantize import (
    embedding_int8,
    layer_norm_quantize,
    linear_fp8,
    linear_int4,
    linear_int8,
    linear_w4a8,
    linear_w8a8,
    quantize_rows,
    quantize_rows_fp8,
    rms_norm_add_quantize,
    rms_norm_quantize,
    silu_mul_quantize,
)
from inferc.ir.ops.rope import PAIRS as rope_pairs
from inferc.ir.ops.rope import rope, rope_table

__all__ = [
    "all_gather",
    "all_reduce",
    "attention",
    "cached_head_dim",
    "dense_attention",
    "dense_latent_attention",
    "dense_write",
    "dense_write_attention",
    "dense_write_attention_in_place",
    "dense_write_in_place",
    "embedding_int8",
    "expert_choose",
    "expert_combine",
    "expert_dispatch",
    "gelu_mul",
    "head_linear",
    "joined",
    "kv_write",
    "kv_write_in_place",
    "latent_attention",
    "latent_write",
    "latent_write_in_place",
    "layer_norm",
    "layer_norm_quantize",
    "linear_add",
    "linear_fp8",
    "linear_int4",
    "linear_int8",
    "linear_silu_mul",
    "linear_w4a8",
    "linear_w8a8",
    "linear_wide",
    "lm_head",
    "lora_expand",
    "lora_lookup",
    "lora_shrink",
    "moe_experts",
    "moe_routing",
    "norm_rope_kv_write",
    "norm_rope_kv_write_in_place",
    "paged_attention",
    "pointwise",
    "qkv_rope_kv_write",
    "qkv_rope_kv_write_in_place",
    "quantize_rows",
    "quantize_rows_fp8",
    "resize_heads",
    "rms_norm",
    "rms_norm_add",
    "rms_norm_add_quantize",
    "rms_norm_quantize",
    "rope",
    "rope_kv_write",
    "rope_kv_write_in_place",
    "rope_pairs",
    "rope_table",
    "run_ranks",
    "silu_mul",
    "silu_mul_quantize",
    "visible",
]
