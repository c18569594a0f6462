"""Tests that a model which cannot be compiled is refused by name, with the reason in the model."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from random_models import SIZES

from inferc.errors import ExportError, UnsupportedError
from inferc.frontend.checkpoint.load import check_config, from_config
from inferc.frontend.export import export_model

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mamba2": (
        {"num_heads": 4, "head_dim": 32, "n_groups": 1, "state_size": 16},
        r"mamba2 has layer 0 of type linear_attention; expected attention in every layer \(sequence state is not built",
    ),
    "qwen3_next": ({"num_hidden_layers": 4}, "qwen3_next has layer 0 of type linear_attention"),
    "jamba": ({}, "jamba has layer 0 of type linear_attention"),
    "rwkv": ({}, "rwkv has a recurrent state"),
    "deepseek_v32": ({}, r"deepseek_v32 chooses the 2048 keys .* \(index_topk.*: dynamic sparse attention"),
    "glm_moe_dsa": ({}, "glm_moe_dsa chooses the .* dynamic sparse attention"),
    "nemotron_h": (
        {"layer_types": ["full_attention", "mlp"], "head_dim": 16},
        "layer 1 of nemotron_h is of type mlp and has no attention; expected attention in every layer",
    ),
    "t5": ({}, "t5 is an encoder-decoder model"),
    "gemma3": ({}, r"gemma3 is multimodal \(text_config, vision_config\)"),
    "blt": ({}, r"blt is made of several models \(patcher_config, .*\); expected one decoder of text tokens"),
    "falcon": ({"alibi": True}, "its ALiBi is rounded to bfloat16 at every position"),
    "bert": ({}, r"bidirectional attention \(is_decoder is false in its config\); expected causal, sliding or chunked"),
    "llama": (
        {"is_causal": False},
        (
            r"LlamaForCausalLM: bidirectional attention \(is_causal is false in its config\); expected causal, sliding"
            r" or chunked"
        ),
    ),
    "gemma3_text": (
        {"use_bidirectional_attention": True},
        (
            r"bidirectional attention \(use_bidirectional_attention is true in its config\); expected causal, sliding"
            r" or chunked"
        ),
    ),
    "doge": ({"num_experts": None}, "Doge"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    transformers: Any = importlib.import_module("transformers")
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} does not have it")
    fields, message = REFUSED[name]
    sizes = {
        **SIZES,
        "head_dim": None,
        "vocab_size": 320,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
        **fields,
    }
    config = transformers.AutoConfig.for_model(
        name, **{key: value for key, value in sizes.items() if value is not None}
    )
    with pytest.raises((UnsupportedError, ExportError), match=message) as caught:
        check_config(config, {}, name)
        export_model(from_config(config, None), "bfloat16", 128)
    assert "\n" not in str(caught.value)
    assert "def forward" not in capfd.readouterr().err
