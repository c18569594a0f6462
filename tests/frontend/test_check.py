"""A capture that is not the model is refused, and the message says what differs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from random_models import make_random_model
from torch import Tensor

from inferc.errors import ExportError, UnsupportedError
from inferc.frontend.capture import capture
from inferc.frontend.check import check_capture, check_module, random_copy, shrink
from inferc.frontend.checkpoint.load import Checkpoint, load, load_module
from inferc.frontend.export import export_model
from inferc.frontend.reference import reference_greedy, reference_model
from inferc.frontend.trace import interfaces
from inferc.frontend.trace.masks import Mask
from inferc.ir.layer_kinds import distinct_prefix, layer_kinds
from inferc.ir.program import Program

WINDOWS: dict[str, Any] = {
    "use_sliding_window": True,
    "sliding_window": 9,
    "num_hidden_layers": 3,
    "max_window_layers": 1,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [float(2 + index) for index in range(8)],
}
Attention = Callable[..., tuple[Tensor, None]]


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Program]:
    checkpoint = load(make_random_model("mistral", tmp_path_factory.mktemp("m") / "m", sliding_window=9))
    return checkpoint, export_model(checkpoint, "bfloat16")


def test_a_faithful_capture_passes(mistral: tuple[Checkpoint, Program]) -> None:
    check_capture(mistral[1], mistral[0])


@pytest.mark.slow
def test_faithful_experts_pass(tmp_path: Path) -> None:
    capture(make_random_model("mixtral", tmp_path / "m", num_hidden_layers=1), "bfloat16")


@pytest.mark.slow
def test_every_distinct_layer_is_checked(tmp_path: Path) -> None:
    checkpoint = load(make_random_model("qwen2", tmp_path / "m", "bfloat16", **WINDOWS))
    program = capture(checkpoint, "bfloat16")
    found = [node.args[5:7] for node in program.graph.nodes if node.name.startswith("attention")]
    assert found == [("causal", 0), ("sliding", 9), ("sliding", 9)]
    assert distinct_prefix(layer_kinds(program, ignore_inputs=True)) == 2
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
        return real(module, q, k, v, Mask("causal", 0), **options)

    return attention


def window_off_by_one(real: Attention) -> Attention:
    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
        return real(module, q, k, v, Mask(mask.kind, mask.window + 1), **options)

    return attention


@pytest.mark.quick("window")
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixed", "message"),
    [
        (
            lambda q, k, v: torch.matmul(torch.matmul(q, k.transpose(2, 3)).softmax(-1), v),
            "attention code of the model's own is not known: .*its mask is not causal, sliding or chunked",
        ),
        (
            lambda q, k, v: v.cumsum(2),
            "0 attention nodes were captured in 1 layers, expected one in each, and layer 0 has none; the model",
        ),
    ],
)
def test_attention_past_the_interface_is_counted(
    mixed: Callable[..., Tensor], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plain(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
        return mixed(q, k, v).transpose(1, 2).contiguous(), None

    folder = make_random_model("llama", tmp_path / "m", num_key_value_heads=4, num_hidden_layers=1)
    monkeypatch.setattr(interfaces, "attention", plain)
    with pytest.raises(ExportError, match=message):
        capture(folder, "float32")


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


def other_activation(module: Any) -> None:
    module.model.layers[0].mlp.act_fn = torch.nn.ReLU()


def other_scale(module: Any) -> None:
    module.model.layers[1].self_attn.scaling = 0.01


def other_forward(module: Any) -> None:
    whole = module.model.norm.forward
    module.model.norm.forward = lambda x: 1.5 * whole(x)


def other_config(module: Any) -> None:
    module.config.rms_norm_eps = 0.5


@pytest.mark.slow
@pytest.mark.parametrize("change", [other_activation, other_scale, other_forward, other_config])
def test_a_module_that_is_not_its_configs_is_refused(change: Callable[[Any], None], tiny_llama_folder: Path) -> None:
    module = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama_folder)
    change(module)
    with pytest.raises(UnsupportedError, match="computes something else than its config's model") as caught:
        capture(module, "float32", 64)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "dtype", "sizes"),
    [
        ("llama", "bfloat16", {}),
        ("mixtral", "float32", {}),
        ("llama", "float32", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}),
        ("phi3", "float32", {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 64}),
    ],
)
def test_a_module_as_its_class_makes_it_passes(family: str, dtype: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    folder = make_random_model(family, tmp_path / "m", dtype, **sizes)
    module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).train()
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    module(input_ids=torch.arange(300)[None])  # a rope that depends on length keeps what it saw
    check_module(load_module(module))
    assert module.training
    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
    module.model.layers[0].mlp.forward = lambda x: x
    with pytest.raises(UnsupportedError, match="something else"):
        check_module(load_module(module))
