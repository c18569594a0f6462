"""A small random model of any causal language model class of transformers, with sizes that divide by little.

What a config class has no field for is left out of `SIZES`; `OWN` says what else a class needs to be small, valid, and
to have in force what it is made for.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from random_models import make_tokenizer

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LENGTH = 3, 288, 6, 2, 80, 208, 128
VOCABULARY = 509
EXPERTS = {"num": 7, "top": 3, "inner": 48}
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "emb_dim", "dim", "word_embed_proj_dim"), HIDDEN),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), HEADS),
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "decoder_ffn_dim", "ffn_hidden_size", "dim_ff"), INNER
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), LENGTH),
    **dict.fromkeys(("sliding_window", "attention_window"), 11),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS["num"]),
    **dict.fromkeys(("num_experts_per_tok", "moe_top_k", "moe_k", "moe_topk", "top_k_experts"), EXPERTS["top"]),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), EXPERTS["inner"]),
    "n_shared_experts": 2,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 2,
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    "kv_lora_rank": 48,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias"), True),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_eps"), 1e-5),
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": False,
}
ALWAYS = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
    "is_decoder": True,
}
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
MOST_PARAMETERS = 20_000_000
LEFT_OUT = "left out"  # as a value of OWN: a field of SIZES that the class is to choose by itself
NO_INPUTS = ("hidden_size_per_layer_input", "vocab_size_per_layer_input")
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 72,
    "time_step_limit": [0.0, 100.0],
}  # which such a class checks though no layer is one
OWN: dict[str, dict[str, Any]] = {
    "bamba": {**MAMBA, "attn_layer_indices": list(range(LAYERS))},
    "codegen": {"n_embd": 256, "n_head": 4, "rotary_dim": 32},  # whose heads are packed in fours
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "dbrx": {
        "attn_config": {"kv_n_heads": KV_HEADS, "clip_qkv": 2.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": INNER, "moe_num_experts": EXPERTS["num"], "moe_top_k": EXPERTS["top"]},
    },
    "falcon": {"num_kv_heads": KV_HEADS, "new_decoder_architecture": True, "alibi": False},
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", **dict.fromkeys(NO_INPUTS, 0)}},
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]], "window_size": 11},
    "gptj": {"rotary_dim": 32},
    "granitemoehybrid": {
        **MAMBA,
        "layer_types": ["attention"] * LAYERS,
        "num_local_experts": 0,
        "shared_intermediate_size": INNER,
        "position_embedding_type": "rope",
        "head_dim": LEFT_OUT,
    },
    "xglm": {"attention_heads": HEADS},
    "youtu": {"pad_token_id": None},  # transformers makes its row of zeros, whatever the file has there
    "helium": {"head_dim": HIDDEN // HEADS},  # its output projection is square
    "zamba2": {"layer_types": ["linear_attention", "hybrid", "linear_attention"]},
    "zaya": {"num_experts_per_tok": 1},
    "kolibri1": {"num_experts": EXPERTS["num"]},
    "lfm2": {"layer_types": ["full_attention"] * LAYERS},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma3n_text": {
        "layer_types": WINDOWS,
        "intermediate_size": [INNER] * LAYERS,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 32,
        "laurel_rank": 24,
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.9, 0.0, 0.0],
    },
    "gemma4_text": {
        "layer_types": WINDOWS,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 32,
        "num_kv_shared_layers": 0,
    },
    "cohere_compass_text": {
        "layer_types": WINDOWS,
        "rope_parameters": {name: {"rope_type": "default", "rope_theta": 10000.0} for name in WINDOWS},
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "mamba2": {"num_heads": 12, "head_dim": 48},
    "mimo_v2_flash": {"num_key_value_heads": 3},  # its window layers have a default of their own
    "longcat_flash": {
        "ffn_hidden_size": INNER,
        "expert_ffn_hidden_size": EXPERTS["inner"],
        "zero_expert_num": 2,
        "head_dim": 16,
    },
    "reformer": {"axial_pos_embds": False},
}


class OnlyConfigError(Exception):
    """No model was made, as the class has more parts than a language model, or is too large: its config was written."""


def config_of(model_type: str, **overrides: Any) -> Any:
    """The config of a small model of a type, as its class takes it."""
    import torch
    import transformers

    kind = transformers.CONFIG_MAPPING[model_type]
    known: set[str] = set()
    for each in kind.__mro__:
        known.update(getattr(each, "__annotations__", ()))
        if made_with := vars(each).get("__init__"):
            known.update(inspect.signature(made_with).parameters)
    renamed = getattr(kind, "attribute_map", None) or {}
    fields = {name: value for name, value in SIZES.items() if name in known and name not in renamed}
    fields.update(ALWAYS)
    if "kv_lora_rank" in fields:  # K and V of all heads are made of one latent
        fields["num_key_value_heads"] = HEADS
    fields.update(OWN.get(model_type, {}))
    fields.update(overrides)
    config = kind(**{name: value for name, value in fields.items() if value != LEFT_OUT})
    config.dtype = torch.float32
    return config


def _is_model(name: str, part: Any) -> bool:
    """Return whether a part of a config is a model's: a decoder's, or of another modality."""
    said = ("text", "vision", "audio", "image", "vq", "patcher", "coder")
    return part is not None and (hasattr(part, "num_hidden_layers") or any(each in name for each in said))


def make_odd_model(model_type: str, folder: Path, seed: int = 3, **overrides: Any) -> Path:
    """Write a small random float32 model of a type, with a tokenizer, to `folder`, and return the folder.

    Raises OnlyConfigError where no model was made. Of what a config's class needs, `OWN` has what SIZES does not say.
    """
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder)
    config = config_of(model_type, **overrides)
    parts = [name for name in getattr(config, "sub_configs", {}) if _is_model(name, getattr(config, name, None))]
    if parts or getattr(config, "is_encoder_decoder", False):
        config.save_pretrained(folder)
        raise OnlyConfigError(", ".join(parts) or "an encoder")
    with torch.device("meta"):
        size = sum(each.numel() for each in transformers.AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        config.save_pretrained(folder)
        raise OnlyConfigError(f"{size} parameters; what is not refused by its config is to be made smaller in OWN")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
    randomise(model, seed)
    model.generation_config = transformers.GenerationConfig(bos_token_id=0, eos_token_id=1)
    model.save_pretrained(folder)
    return folder


def _is_projection(model: Any, name: str) -> bool:
    """Return whether a parameter is the weight of a linear layer, as of one that widens the rows of an embedding."""
    import torch

    return isinstance(model.get_submodule(name.rpartition(".")[0]), torch.nn.Linear)


def randomise(model: Any, seed: int) -> None:
    """Give every parameter, and every bias of a router, a value that a mistake would show: none is 0 or 1."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            own = ".".join(name.lower().split(".")[-2:])  # of the module and its parameter, not of what holds them
            is_scale = any(part in own for part in ("norm", "ln_", "ln.")) and not name.endswith("bias")
            if is_scale or parameter.dim() < 2:
                parameter.copy_(is_scale + 0.2 * noise)
            elif any(part in name for part in ("embed", "wte", "wpe")) and not _is_projection(model, name):
                parameter.copy_(0.6 * noise)
            else:
                parameter.copy_(1.1 * parameter.shape[-1] ** -0.5 * noise)
        for name, buffer in model.named_buffers():
            if "bias" in name and buffer.is_floating_point():
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
