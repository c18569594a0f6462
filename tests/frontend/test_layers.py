"""Tests of which layers repeat, and that a model's costs follow from two shortened ones."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferc.compiler import explain as explaining
from inferc.compiler.explain import ExplainedModel, explain_model
from inferc.config import CompileConfig
from inferc.frontend.checkpoint.load import load_config
from inferc.frontend.layers import Repetition, layer_kinds, repetition, shortened

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 256,
}
LATENT = {  # with a buffer in each layer of experts, and K and V from a latent
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 32}


def folder(path: Path, family: str, num_layers: int, **more: Any) -> Path:
    """A model folder that holds config.json alone."""
    config = {"model_type": family, "num_hidden_layers": num_layers, "dtype": "float32", **SIZES, **more}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the check that a capture is the model, which is tested elsewhere and takes longer than the capture."""
    monkeypatch.setattr("inferc.frontend.check.check_capture", lambda *arguments: None)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("a" * 80, Repetition(2, 1, 78)),
        ("dddmmmmmmmm", Repetition(4, 1, 7)),  # the last layer must be of the kind that ends the model
        ("sssssf" * 10 + "ss", Repetition(8, 6, 9)),
        ("sf" * 13, Repetition(2, 2, 12)),
        ("a" * 5, None),  # 2 layers and 3 are as many as 5
        ("a" * 20 + "b", None),
        ("abcdefgh", None),
        ("a", None),
        ("", None),
    ],
)
def test_repetition(kinds: str, expected: Repetition | None) -> None:
    assert repetition(kinds) == expected


@pytest.mark.slow
@given(st.text("ab", max_size=30), st.text("abc", min_size=1, max_size=4), st.integers(1, 12))
def test_a_repetition_says_how_the_whole_is_made(head: str, period: str, times: int) -> None:
    kinds = head + period * times
    found = repetition(kinds)
    if found is None:
        return
    added = kinds[found.short : found.longer]
    assert kinds == kinds[: found.short] + added * found.times
    assert kinds[found.short - 1] == kinds[-1]
    assert set(kinds[: found.short]) == set(kinds)
    assert found.short + found.longer < len(kinds)


@pytest.mark.slow
def test_kinds_tell_layers_apart(tmp_path: Path) -> None:
    equal = layer_kinds(load_config(folder(tmp_path, "llama", 4)))
    assert len(equal) == 4 and len(set(equal)) == 1
    windows = layer_kinds(load_config(folder(tmp_path, "qwen2", 5, max_window_layers=2, **WINDOWS)))
    assert len(set(windows[:2])) == len(set(windows[2:])) == 1 and windows[0] != windows[2]
    experts = folder(
        tmp_path,
        "qwen3_moe",
        3,
        mlp_only_layers=[1],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    )
    first, second, third = layer_kinds(load_config(experts))
    assert first == third != second


@pytest.mark.slow
def test_a_config_alone_is_a_checkpoint_of_its_class(tmp_path: Path) -> None:
    checkpoint = load_config(folder(tmp_path, "llama", 2, tie_word_embeddings=True))
    assert checkpoint.dtype == "float32"
    assert checkpoint.tensors["model.embed_tokens.weight"][0] == (320, 64)
    assert "lm_head.weight" not in checkpoint.tensors  # a tied one is stored once
    assert {name.split(".")[2] for name in checkpoint.tensors if ".layers." in name} == {"0", "1"}
    fewer = shortened(checkpoint, 1)
    assert {name.split(".")[2] for name in fewer.tensors if ".layers." in name} == {"0"}
    assert load_config(tmp_path / "config.json").tensors == checkpoint.tensors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "num_layers", "lengths", "more"),
    [
        ("llama", 6, (2, 3), {"tie_word_embeddings": True}),
        pytest.param(
            "qwen2",
            8,
            (2, 4),
            {"layer_types": ["sliding_attention", "full_attention"] * 4, **WINDOWS},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "qwen3_moe",
            6,
            (2, 3),
            {"mlp_only_layers": [0], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
            marks=pytest.mark.slow,
        ),
        pytest.param("deepseek_v3", 6, (2, 3), LATENT, marks=pytest.mark.slow),
    ],
)
def test_shortened_models_say_what_the_whole_one_does(
    family: str,
    num_layers: int,
    lengths: tuple[int, int],
    more: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    unchecked: None,
) -> None:
    model = folder(tmp_path, family, num_layers, **more)

    def explained() -> ExplainedModel:
        return explain_model(model, CompileConfig(), lambda stage, done, total: None)

    found = explained()
    assert found.captured_layers == lengths
    monkeypatch.setattr(explaining, "repetition", lambda kinds: None)
    whole = explained()
    assert whole.captured_layers == (num_layers,)
    assert found.refusal == whole.refusal
    assert found.costs == whole.costs


@pytest.mark.slow
def test_layers_that_only_look_equal_are_all_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unchecked: None
) -> None:
    types = {"mlp_only_layers": [2], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = folder(tmp_path, "qwen3_moe", 6, **types)
    monkeypatch.setattr(explaining, "layer_kinds", lambda checkpoint: ["same"] * 6)
    found = explain_model(model, CompileConfig(), lambda stage, done, total: None)
    assert found.captured_layers == (6,)
