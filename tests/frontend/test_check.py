"""A capture that is not the model is refused, and the message says what differs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from random_models import make_random_model
from torch import Tensor

from inferc.errors import ExportError
from inferc.frontend import interfaces
from inferc.frontend.check import check_capture, distinct_prefix, random_copy, shrink
from inferc.frontend.export import capture, export_model
from inferc.frontend.load import Checkpoint, load
from inferc.frontend.reference import reference_greedy, reference_model
from inferc.program import Program

WINDOWS: dict[str, Any] = {
    "use_sliding_window": True,
    "sliding_window": 9,
    "num_hidden_layers": 3,
    "max_window_layers": 1,
}
Attention = Callable[..., tuple[Tensor, None]]


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Program]:
    checkpoint = load(make_random_model("mistral", tmp_path_factory.mktemp("m") / "m", sliding_window=9))
    return checkpoint, export_model(checkpoint, "bfloat16")


def test_a_faithful_capture_passes(mistral: tuple[Checkpoint, Program]) -> None:
    check_capture(mistral[1], mistral[0])


def test_faithful_experts_pass(tmp_path: Path) -> None:
    capture(make_random_model("mixtral", tmp_path / "m", num_hidden_layers=1), "bfloat16")


def test_every_distinct_layer_is_checked(tmp_path: Path) -> None:
    checkpoint = load(make_random_model("qwen2", tmp_path / "m", "bfloat16", **WINDOWS))
    program = capture(checkpoint, "bfloat16")
    found = [node.args[5:7] for node in program.graph.nodes if node.name.startswith("attention")]
    assert found == [("causal", 0), ("sliding", 9), ("sliding", 9)]
    assert distinct_prefix(program) == 2
    copied = random_copy(program, checkpoint, "bfloat16")
    assert copied.config.num_hidden_layers == 2
    assert copied.dtype == "bfloat16"
    assert len(reference_greedy(reference_model(copied, "float32"), [1, 2, 3], 4)) == 4


def wrong_scale(real: Attention) -> Attention:
    def attention(module: Any, *args: Any, scaling: float, **options: Any) -> tuple[Tensor, None]:
        return real(module, *args, scaling=scaling * 1.01, **options)

    return attention


def lost_window(real: Attention) -> Attention:
    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
        return real(module, q, k, v, interfaces.Mask("causal", 0), **options)

    return attention


def window_off_by_one(real: Attention) -> Attention:
    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
        return real(module, q, k, v, interfaces.Mask(mask.kind, mask.window + 1), **options)

    return attention


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (wrong_scale, "the first difference is in layer 0"),
        (lost_window, "inferc.attention causal instead of inferc.attention sliding"),
        (window_off_by_one, "the first difference is in layer 0"),
    ],
    ids=["scale", "window", "off_by_one"],
)
def test_wrong_attention_is_caught(
    change: Callable[[Attention], Attention],
    message: str,
    mistral: tuple[Checkpoint, Program],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interfaces, "attention", change(interfaces.attention))
    with pytest.raises(ExportError, match=f"not the model.*{message}") as caught:
        check_capture(mistral[1], mistral[0])
    assert "\n" not in str(caught.value)


def test_wrong_experts_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_random_model("mixtral", tmp_path / "m", num_hidden_layers=1)
    real = interfaces.experts
    monkeypatch.setattr(interfaces, "experts", lambda m, x, ids, weights: real(m, x, ids, weights.flip(1)))
    with pytest.raises(ExportError, match="the first difference is in layer 0"):
        capture(folder, "float32")


def test_attention_past_the_interface_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
        return torch.matmul(torch.matmul(q, k.transpose(2, 3)).softmax(-1), v).transpose(1, 2).contiguous(), None

    folder = make_random_model("llama", tmp_path / "m", num_key_value_heads=4, num_hidden_layers=1)
    monkeypatch.setattr(interfaces, "attention", plain)
    with pytest.raises(ExportError, match="0 attention nodes were captured, expected 1, one a layer"):
        capture(folder, "float32")


def test_bloom_loses_no_mask(tmp_path: Path) -> None:
    config = transformers.BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=320)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ExportError, match="BloomForCausalLM.*attention interface"):
        capture(tmp_path, "float32")


def test_a_big_model_has_a_small_copy() -> None:
    config = transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        pad_token_id=128004,
    )
    small = shrink(config, 2, {"vocab_size": 512, "intermediate_size": 64}, narrow=True)
    assert (small.num_hidden_layers, small.hidden_size, small.intermediate_size) == (2, 256, 64)
    assert (small.num_attention_heads, small.num_key_value_heads, small.head_dim) == (32, 8, 128)
    assert small.pad_token_id is None
    assert config.vocab_size == 128256
