"""Configs of listed families that published checkpoints have and `families.py` lacks: a switch that is off by default.

Each is compiled and gives transformers' logits, or is refused with a reason that names the feature.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from families import FAMILIES, MIXED, WINDOW

WIDE = {"hidden_size": 80, "head_dim": 20}  # heads that no kernel takes as they are


@dataclass(frozen=True)
class Variant:
    """`fields` on top of those of a row of FAMILIES, or of the model type of that name where there is none."""

    of: str
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def model_type(self) -> str:
        return FAMILIES[self.of].model_type(self.of) if self.of in FAMILIES else self.of

    @property
    def base(self) -> dict[str, Any]:
        return FAMILIES[self.of].fields if self.of in FAMILIES else {}

    @property
    def config(self) -> dict[str, Any]:
        return {**self.base, **self.fields}


WINDOWED = {"use_sliding_window": True, "sliding_window": WINDOW}
BIASED = {"attention_bias": True, "mlp_bias": True}
TIED = {"tie_word_embeddings": True}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32}
ROUTES = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

COMPILED: dict[str, Variant] = {
    "olmo: clip_qkv": Variant("olmo", {"clip_qkv": 0.5, "attention_bias": True, **TIED}),
    "olmoe: clip_qkv": Variant("olmoe", {"clip_qkv": 0.5, "attention_bias": True, "norm_topk_prob": True}),
    "nemotron: norms with 1 + w": Variant("nemotron", {"norm_eps": 1e-3, "partial_rotary_factor": 0.25}),
    "nemotron: biases": Variant("nemotron", {"norm_eps": 1e-3, **BIASED, **TIED}),
    "stablelm: qk_layernorm": Variant("stablelm", {"qk_layernorm": True}),
    "stablelm: parallel residual, biases": Variant(
        "stablelm", {"qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": True, **TIED}
    ),
    "llama: heads of 20": Variant("llama", WIDE),
    "gpt_neox: heads of 20": Variant("gpt_neox", WIDE),
    "phi3: heads of 20": Variant("phi3", WIDE),
    "qwen3: heads of 20, behind norms": Variant("qwen3", {"head_dim": 20}),
    "cohere: heads of 20, with norms of their own": Variant("cohere", WIDE),
    "gpt2: heads of 20, packed": Variant("gpt2", {"hidden_size": 80, "activation_function": "gelu"}),
    "llama: biases, tied": Variant("llama", {**BIASED, **TIED}),
    "llama: one KV head": Variant("llama", {"num_key_value_heads": 1}),
    "llama: as many KV heads as heads": Variant("llama", {"num_key_value_heads": 4}),
    "qwen2: untied": Variant("qwen2", {"tie_word_embeddings": False}),
    "qwen3: biases, windows": Variant("qwen3", {**WINDOWED, "max_window_layers": 1, "attention_bias": True, **TIED}),
    "mistral: wide heads, tied": Variant("mistral", {"head_dim": 32, **TIED}),
    "gemma: biases, tied": Variant("gemma", {"attention_bias": True, **TIED}),
    "gemma2: biases, no softcaps, tied": Variant(
        "gemma2",
        {"attention_bias": True, "attn_logit_softcapping": None, "final_logit_softcapping": None, **TIED},
    ),
    "gemma3_text: biases, softcaps": Variant(
        "gemma3_text", {"attention_bias": True, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
    ),
    "phi: qk_layernorm, tied": Variant("phi", {"qk_layernorm": True, "hidden_act": "gelu", **TIED}),
    "phi3: partial rope, no window, tied": Variant(
        "phi3", {"partial_rotary_factor": 0.5, "sliding_window": None, **TIED}
    ),
    "gpt2: scales, inner size, tied": Variant(
        "gpt2",
        {
            "scale_attn_by_inverse_layer_idx": True,
            "reorder_and_upcast_attn": True,
            "n_inner": 80,
            "activation_function": "relu",
            **TIED,
        },
    ),
    "gpt2: unscaled": Variant("gpt2", {"scale_attn_weights": False, "activation_function": "silu"}),
    "gpt_neox: sequential, no biases, tied": Variant(
        "gpt_neox", {"use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_fast", **TIED}
    ),
    "gpt_bigcode: a KV head for each": Variant(
        "gpt_bigcode", {"multi_query": False, "activation_function": "gelu", "n_inner": 80, **TIED}
    ),
    "gpt_bigcode: unscaled": Variant("gpt_bigcode", {"scale_attn_weights": False, "activation_function": "relu"}),
    "opt: norms behind, projected embeddings": Variant(
        "opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32, "activation_function": "gelu"}
    ),
    "opt: no biases, norms without weights": Variant(
        "opt", {"enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "silu"}
    ),
    "opt: no last norm": Variant("opt", {"_remove_final_layer_norm": True, **TIED}),
    "olmo2: biases, tied": Variant("olmo2", {"attention_bias": True, **TIED}),
    "granite: biases, tied": Variant("granite", {**BIASED, **TIED}),
    "cohere: biases, no norms of heads, tied": Variant(
        "cohere", {"attention_bias": True, "use_qk_norm": False, **TIED}
    ),
    "cohere2: biases, tied": Variant("cohere2", {"attention_bias": True, **TIED}),
    "starcoder2: no biases, tied": Variant("starcoder2", {"use_bias": False, "hidden_act": "gelu", **TIED}),
    "glm: no biases, tied": Variant("glm", {"attention_bias": False, **TIED}),
    "glm4: no biases, tied": Variant("glm4", {"attention_bias": False, **TIED}),
    "smollm3: windows, biases, tied": Variant(
        "smollm3", {**WINDOWED, "layer_types": MIXED, "num_hidden_layers": 3, **BIASED, **TIED}
    ),
    "seed_oss: other biases, tied": Variant(
        "seed_oss", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True, **TIED}
    ),
    "exaone4: no windows": Variant("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4, **TIED}),
    "ernie4_5: biases, tied": Variant("ernie4_5", {"use_bias": True, **TIED}),
    "helium: biases, tied": Variant("helium", {**BIASED, **TIED}),
    "arcee: biases, tied": Variant("arcee", {**BIASED, **TIED}),
    "mixtral: window, wide heads, tied": Variant("mixtral", {"sliding_window": WINDOW, "head_dim": 32, **TIED}),
    "qwen2_moe: renormalised, no biases, sparse steps": Variant(
        "qwen2_moe", {"norm_topk_prob": True, "qkv_bias": False, "mlp_only_layers": [], "decoder_sparse_step": 2}
    ),
    "qwen3_moe: renormalised, biases, windows, dense layers": Variant(
        "qwen3_moe", {**WINDOWED, "norm_topk_prob": True, "attention_bias": True, "mlp_only_layers": [0], **TIED}
    ),
    "granitemoe: biases, multipliers, tied": Variant(
        "granitemoe",
        {
            "attention_bias": True,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            **TIED,
        },
    ),
    "hunyuan_v1_moe: biases, wide heads, tied": Variant(
        "hunyuan_v1_moe", {"attention_bias": True, "head_dim": 32, **TIED}
    ),
    "ernie4_5_moe: biases, no shared experts, no dense layers": Variant(
        "ernie4_5_moe",
        {"use_bias": True, "moe_num_shared_experts": 0, "moe_layer_start_index": 0, **TIED},
    ),
    "minimax_m2: tied": Variant("minimax_m2", TIED),
    "glm4_moe: norms of heads, biases, scaled, tied": Variant(
        "glm4_moe",
        {
            "use_qk_norm": True,
            "attention_bias": True,
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.5,
            "n_group": 1,
            "n_shared_experts": 2,
            **TIED,
        },
    ),
    "deepseek_v2: greedy, q at once, biases, scaled": Variant(
        "deepseek_v2",
        {"topk_method": "greedy", "q_lora_rank": None, "mlp_bias": True, "routed_scaling_factor": 2.0, **TIED},
    ),
    "deepseek_v3: rope in halves, q at once, not renormalised": Variant(
        "deepseek_v3", {"rope_interleave": False, "q_lora_rank": None, "norm_topk_prob": False, **TIED}
    ),
    "minicpm3: scales, biases": Variant(
        "minicpm3", {"scale_depth": 0.7, "scale_emb": 3, "dim_model_base": 16, "mlp_bias": True}
    ),
    "gpt_oss: no biases, another clamp, tied": Variant(
        "gpt_oss", {"attention_bias": False, "swiglu_limit": 3.0, **TIED}
    ),
    "llama4_text: no norms of heads, biases, tied": Variant(
        "llama4_text", {"use_qk_norm": False, "attention_bias": True, "attn_scale": 0.3, **TIED}
    ),
    "granitemoehybrid: dense, attention alone": Variant(
        "granitemoehybrid",
        {
            **MAMBA,
            "layer_types": ["attention"] * 2,
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "position_embedding_type": "rope",
            "residual_multiplier": 0.5,
        },
    ),
    "bamba: attention alone": Variant("bamba", {**MAMBA, "attn_layer_indices": [0, 1], "mamba_n_groups": 1}),
    "lfm2: attention alone": Variant("lfm2", {"layer_types": ["full_attention"] * 2}),
    "lfm2_moe: attention alone": Variant(
        "lfm2_moe", {**ROUTES, "layer_types": ["full_attention"] * 2, "num_dense_layers": 1}
    ),
    "qwen3_next: gated attention alone": Variant(
        "qwen3_next",
        {
            **ROUTES,
            "layer_types": ["full_attention"] * 2,
            "shared_expert_intermediate_size": 32,
            "head_dim": 32,
            "partial_rotary_factor": 0.5,
        },
    ),
    "jamba: attention alone": Variant(
        "jamba",
        {"attn_layer_period": 1, "attn_layer_offset": 0, "num_experts": 2, "use_mamba_kernels": False},
    ),
    **{
        f"llama: {activation}": Variant("llama", {"hidden_act": activation, "num_hidden_layers": 1})
        for activation in ("gelu", "gelu_fast", "quick_gelu", "relu", "relu2")
    },
}

REFUSED: dict[str, tuple[Variant, str]] = {
    "llama: gelu_10": (
        Variant("llama", {"hidden_act": "gelu_10", "num_hidden_layers": 1}),
        "inferc cannot run aten.clip yet .node layers.0.mlp.act_fn.clip.: this model's family is not supported",
    ),
    "llama: mish": (
        Variant("llama", {"hidden_act": "mish", "num_hidden_layers": 1}),
        "inferc cannot run aten.mish yet .node layers.0.mlp.act_fn.mish.: this model's family is not supported",
    ),
    "gemma3_text: attention in both directions": (
        Variant("gemma3_text", {"use_bidirectional_attention": True}),
        (
            "Gemma3ForCausalLM: bidirectional attention .use_bidirectional_attention is true in its config.;"
            " expected causal"
        ),
    ),
}
"""The variants that stay refused, each with the reason."""
