"""The model families that inferc runs: a small random config of each, with what makes it special in force.

`docs/models.md` is this table. A row holds in every transformers version of the constraints files that has the family.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import transformers

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [float(2 + index) for index in range(8)],
    "original_max_position_embeddings": 32,
}
WINDOW = 24  # shorter than the longest prompts
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
GROUPS = {"n_group": 2, "topk_group": 1}
LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "head_dim": 16,
}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 1}
OLD = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}  # names of GPT-2's time


@dataclass(frozen=True)
class Family:
    """A family's test model: `fields` of the Hugging Face config (`...`: left out), and its features in `off`.

    `off`: a feature's name -> fields without it, which must change the logits.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    off: dict[str, dict[str, Any]] = field(default_factory=dict)
    of: str = ""  # the model type, where a family has several rows
    also: tuple[str, ...] = ()  # features that a config cannot switch off
    since: str = ""  # the transformers version that runs it first, where that is not the oldest supported

    def model_type(self, name: str) -> str:
        return self.of or name


FAMILIES: dict[str, Family] = {
    "llama": Family({"rope_parameters": LLAMA3}, {"llama3 rope": {"rope_parameters": PLAIN}}),
    "llama-linear": Family({"rope_parameters": LINEAR}, {"linear rope": {"rope_parameters": PLAIN}}, "llama"),
    "llama-yarn": Family({"rope_parameters": YARN}, {"yarn": {"rope_parameters": PLAIN}}, "llama"),
    "qwen2": Family({"tie_word_embeddings": True}, also=("tied embeddings",)),
    "qwen2-windows": Family(
        {"use_sliding_window": True, "sliding_window": WINDOW, "num_hidden_layers": 3, "max_window_layers": 1},
        {"full and window layers": {"use_sliding_window": False}},
        "qwen2",
    ),
    "qwen3": Family(also=("q and k norms",)),
    "mistral": Family({"sliding_window": WINDOW}, {"sliding window": {"sliding_window": None}}),
    "gemma": Family(also=("GeGLU, scaled embeddings, norms with 1 + w",)),
    "gemma2": Family(
        {
            "sliding_window": WINDOW,
            "num_hidden_layers": 3,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
        {
            "window layers": {"layer_types": ["full_attention"] * 3},
            "attention softcap": {"attn_logit_softcapping": None},
            "logit softcap": {"final_logit_softcapping": None},
        },
        also=("norms behind the blocks",),
    ),
    "gemma3_text": Family(
        {"sliding_window": WINDOW, "num_hidden_layers": 3, "layer_types": MIXED, "query_pre_attn_scalar": 20},
        {"window layers with a rope of their own": {"layer_types": ["full_attention"] * 3}},
        also=("q and k norms",),
    ),
    "phi": Family(
        {"partial_rotary_factor": 0.5},
        {"partial rope": {"partial_rotary_factor": 1.0}},
        also=("LayerNorm, parallel residual",),
    ),
    "phi3": Family({"sliding_window": WINDOW}, {"sliding window": {"sliding_window": None}}),
    "gpt2": Family(OLD, also=("learned positions, LayerNorm",)),
    "gpt_neox": Family(
        {"rotary_pct": 0.5},
        {"partial rope": {"rotary_pct": 1.0}},
        also=("parallel residual, q, k and v packed by heads",),
    ),
    "gpt_bigcode": Family(OLD, also=("one KV head, learned positions",)),
    "opt": Family({"ffn_dim": 96, "word_embed_proj_dim": 64}, also=("learned positions",)),
    "olmo": Family({"clip_qkv": None}, also=("LayerNorm without weights",)),
    "olmo2": Family(also=("norms behind the blocks",)),
    "granite": Family(
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 4.0},
        {
            "embedding scale": {"embedding_multiplier": 1.0},
            "residual scale": {"residual_multiplier": 1.0},
            "logit scale": {"logits_scaling": 1.0},
        },
    ),
    "cohere": Family(
        {"logit_scale": 0.25, "use_qk_norm": True},
        {"logit scale": {"logit_scale": 1.0}},
        also=("interleaved rope, parallel residual, q and k norms by head",),
    ),
    "cohere2": Family({"sliding_window": WINDOW, "num_hidden_layers": 4}, also=("window layers, layers without rope",)),
    "starcoder2": Family({"sliding_window": WINDOW}, {"sliding window": {"sliding_window": None}}),
    "glm": Family({"partial_rotary_factor": 0.5}, also=("partial interleaved rope",)),
    "glm4": Family({"partial_rotary_factor": 0.5}, also=("partial interleaved rope, norms behind the blocks",)),
    "smollm3": Family({"num_hidden_layers": 4, "no_rope_layer_interval": 2}, also=("layers without rope",)),
    "stablelm": Family({"partial_rotary_factor": 0.5}, {"partial rope": {"partial_rotary_factor": 1.0}}),
    "seed_oss": Family(),
    "exaone4": Family(
        {"sliding_window": WINDOW, "num_hidden_layers": 4, "sliding_window_pattern": 4},
        also=("window layers, layers without rope",),
    ),
    "ernie4_5": Family(also=("interleaved rope",)),
    "helium": Family(also=("interleaved rope",)),
    "arcee": Family(also=("squared ReLU",)),
    "mixtral": Family({"num_local_experts": 4, "num_experts_per_tok": 2}, also=("renormalised top-k",)),
    "qwen2_moe": Family(
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
        },
        {"dense layers": {"mlp_only_layers": []}},
        also=("shared expert with a gate",),
    ),
    "qwen3_moe": Family(
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}, also=("softmax routing",)
    ),
    "olmoe": Family({"num_experts": 4, "num_experts_per_tok": 2}, also=("softmax routing",)),
    "granitemoe": Family(
        {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 4.0}, also=("softmax of the chosen",)
    ),
    "hunyuan_v1_moe": Family({"num_experts": 4, "moe_topk": 2}, also=("float32 router, shared expert",)),
    "ernie4_5_moe": Family(
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}, also=("router with a bias",)
    ),
    "minimax_m2": Family({"num_local_experts": 4, "num_experts_per_tok": 2}, also=("sigmoid routing with a bias",)),
    "glm4_moe": Family(
        {**ROUTED, **GROUPS, "num_hidden_layers": 3},
        {"dense layers": {"first_k_dense_replace": 0}},
        also=("sigmoid routing with a bias, groups, shared expert",),
    ),
    "deepseek_v2": Family(
        {**ROUTED, **GROUPS, **LATENT, "topk_method": "group_limited_greedy", "first_k_dense_replace": 1},
        {"dense layers": {"first_k_dense_replace": 0}},
        also=("latent attention (absorbed), complex rope, groups of experts, shared experts",),
    ),
    "deepseek_v3": Family(
        {**ROUTED, **GROUPS, **LATENT, "num_hidden_layers": 3, "first_k_dense_replace": 1, "rope_parameters": YARN},
        {"dense layers": {"first_k_dense_replace": 0}, "yarn": {"rope_parameters": PLAIN}},
        also=("latent attention (absorbed), sigmoid routing with a bias, groups, shared experts",),
    ),
    "minicpm3": Family(LATENT, also=("latent attention (absorbed)",)),
    "gpt_oss": Family(
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW, "rope_parameters": YARN},
        {"window layers": {"layer_types": ["full_attention"] * 2}, "yarn": {"rope_parameters": PLAIN}},
        also=("sinks, clamped SwiGLU, experts with biases",),
    ),
    "llama4_text": Family(
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "attention_chunk_size": WINDOW,
            "intermediate_size_mlp": 96,
            "num_hidden_layers": 4,
            "no_rope_layer_interval": 4,
            "interleave_moe_layer_step": 2,
            "attn_temperature_tuning": True,
            "floor_scale": 8,
        },
        {
            "chunked attention": {"attention_chunk_size": 4096},
            "attention temperature": {"attn_temperature_tuning": False},
        },
        also=("complex rope, layers without rope, inputs scaled by the router",),
    ),
}

# Attention that the model's own code computes, with or without ALiBi.
ODD_HEADS = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3}
FAMILIES |= {
    "bloom": Family({**ODD_HEADS, "n_head": 3, "n_layer": 2}, also=("ALiBi, q, k and v packed by heads",)),
    "mpt": Family({"d_model": 48, "n_heads": 3, "n_layers": 2, "max_seq_len": 256}, also=("ALiBi, LayerNorm",)),
    "falcon": Family(
        {"head_dim": ..., "new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 96},
        also=("rope, parallel residual with two norms, groups of q, k and v packed",),
    ),
    "falcon-one-kv-head": Family(
        {"head_dim": ..., "new_decoder_architecture": False, "multi_query": True, "ffn_hidden_size": 96},
        {"parallel residual": {"parallel_attn": False}},
        "falcon",
        also=("one KV head",),
    ),
    "gptj": Family({**OLD, "rotary_dim": 8}, also=("partial interleaved rope by a table, parallel residual",)),
    "codegen": Family(
        {**OLD, "rotary_dim": 8}, also=("partial interleaved rope by a table, q, k and v in four parts",)
    ),
    "gpt_neo": Family(
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
        {"window layers": {"attention_types": [[["global"], 2]]}},
        also=("learned positions, scores without a scale",),
    ),
    "gpt_neox_japanese": Family(  # transformers 5.17 has the class, and fails in its partial rope
        {"intermediate_multiple_size": 2, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
        {"partial rope": {"rope_parameters": PLAIN}},
        since="5.23.0",
    ),
    "xglm": Family(
        {"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 96},
        also=("positions from sines and cosines",),
    ),
}
# What onnx and tensorrt take, whose cache is dense: ALiBi is not built over one.
DENSE = [name for name in FAMILIES if name not in ("bloom", "mpt")]


Scheme = TypeVar("Scheme")
DIFFERENT = ("llama", "gpt2", "mixtral", "gpt_oss")  # no two have the same ops around their products


def by_turns(names: Iterable[str], schemes: Sequence[Scheme]) -> list[tuple[str, Scheme]]:
    """Pairs of a family and a scheme: all schemes for the families of DIFFERENT, and one in turn for each other."""
    pairs: list[tuple[str, Scheme]] = []
    for index, name in enumerate(names):
        chosen = schemes if name in DIFFERENT else [schemes[index % len(schemes)]]
        pairs += [(name, scheme) for scheme in chosen]
    return pairs


def skip_without(family: Family, name: str) -> None:
    """Skip the test of a family that the installed transformers does not run, if the table says so."""
    if family.since > transformers.__version__:
        pytest.skip(f"transformers {transformers.__version__} does not run it")
    assert family.model_type(name) in transformers.CONFIG_MAPPING, f"{name} is said to be known since {family.since}"
