"""Tests of which checkpoint tensors make which parameter, against what `from_pretrained` loads."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES
from random_models import make_random_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from inferc.errors import ArtifactError, UnsupportedError
from inferc.frontend.checkpoint.bind import Binding, bind
from inferc.frontend.checkpoint.load import Checkpoint, load
from inferc.frontend.export import export_model
from inferc.frontend.trace import torch_export as trace
from inferc.ir.weights import read_whole

ALL = ("llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe")


def bound(folder: Path) -> tuple[Checkpoint, Binding]:
    checkpoint = load(folder)
    model = trace.build(checkpoint.model_class, checkpoint.config, torch.float32, "meta")
    return checkpoint, bind(model, checkpoint)


def check_values(folder: Path) -> Binding:
    checkpoint, binding = bound(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected = model.state_dict()
    assert binding.weights.keys() == expected.keys()
    for name, weight in binding.weights.items():
        assert torch.equal(read_whole(weight, checkpoint.reader), expected[name]), name
    return binding


@pytest.mark.parametrize("max_shard_size", ["1GB", "60KB"])
@pytest.mark.parametrize("family", ALL)
def test_binds_what_transformers_loads(family: str, max_shard_size: str, tmp_path: Path) -> None:
    folder = make_random_model(family, tmp_path / family, max_shard_size=max_shard_size, vocab_size=64)
    assert (folder / "model.safetensors.index.json").exists() == (max_shard_size == "60KB")
    binding = check_values(folder)
    stacked = [name for name, weight in binding.weights.items() if "experts" in name]
    assert bool(stacked) == (family in ("mixtral", "qwen3_moe"))


@pytest.mark.parametrize("family", ["qwen2_moe", "olmoe", "phi3", "gpt2"])
def test_binds_other_families(family: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"pad_token_id": None}
    if family == "qwen2_moe":
        sizes.update(num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=48)
    if family == "olmoe":
        sizes.update(num_experts=4)
    check_values(make_random_model(family, tmp_path / family, **sizes))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_fused_experts_bind_as_they_are(family: str, tmp_path: Path) -> None:
    folder = make_random_model(family, tmp_path / family)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    save_file(dict(model.state_dict()), folder / "model.safetensors")
    binding = check_values(folder)
    assert str(binding.weights["model.layers.0.mlp.experts.down_proj"]) == "model.layers.0.mlp.experts.down_proj"


def test_expert_order_is_by_number(tmp_path: Path) -> None:
    folder = make_random_model("mixtral", tmp_path / "m", num_local_experts=12)
    _, binding = bound(folder)
    sources = [weight.name for weight in binding.weights["model.layers.1.mlp.experts.down_proj"].sources()]
    assert [name.split(".")[-3] for name in sources] == [str(expert) for expert in range(12)]


Change = Callable[[dict[str, Tensor]], object]


def changed(folder: Path, change: Change) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "no tensor for model.layers.1.mlp.up_proj.weight;"),
        (
            lambda t: [t.pop(name) for name in list(t) if "layers.1" in name],
            "no tensor for model.layers.1.* and 8 more",
        ),
        (lambda t: t.update({"model.norm.weight": torch.zeros(65)}), r"model.norm.weight .*\[65\].*expects \[64\]"),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}),
            "q_proj.bias has no use in Llama",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit(change: Change, message: str, tmp_path: Path) -> None:
    folder = changed(make_random_model("llama", tmp_path / "m"), change)
    with pytest.raises(ArtifactError, match=message) as caught:
        bound(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "model.layers.0.self_attn.k_proj.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.2.w2.weight"),  # one of many in a parameter
    ],
)
def test_quantized_numbers_without_scales(family: str, name: str, dtype: str, tmp_path: Path) -> None:
    folder = make_random_model(family, tmp_path / "m")
    changed(folder, lambda t: t.update({name: (t[name] * 100).to(getattr(torch, dtype))}))
    with pytest.raises(UnsupportedError, match=f"tensor {name} is stored as {dtype} and .* expects float32: it looks"):
        bound(folder)


def test_a_checkpoint_in_another_float_binds(tmp_path: Path) -> None:
    folder = make_random_model("llama", tmp_path / "m")
    changed(folder, lambda t: t.update({name: value.to(torch.float64) for name, value in t.items()}))
    assert bound(folder)[1].weights["model.norm.weight"].dtype == torch.float64


@pytest.mark.parametrize(("part", "parameter"), [("w1", "gate_up_proj"), ("w3", "gate_up_proj"), ("w2", "down_proj")])
def test_a_missing_expert(part: str, parameter: str, tmp_path: Path) -> None:
    folder = make_random_model("mixtral", tmp_path / "m")
    name = f"model.layers.0.block_sparse_moe.experts.2.{part}.weight"
    changed(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ArtifactError, match=rf"model\.layers\.0\.mlp\.experts\.{parameter}"):
        bound(folder)


def test_ignorable_tensors_are_listed(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = changed(make_random_model("llama", tmp_path / "m"), lambda t: t.update({name: torch.zeros(8)}))
    assert bound(folder)[1].ignored == [name]


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight"])
def test_tied_weights_need_one_tensor(kept: str, tmp_path: Path) -> None:
    folder = make_random_model("llama", tmp_path / "m", tie_word_embeddings=True)
    changed(folder, lambda tensors: tensors.update({kept: tensors.pop("model.embed_tokens.weight")}))
    binding = check_values(folder)
    assert str(binding.weights["lm_head.weight"]) == str(binding.weights["model.embed_tokens.weight"]) == kept


@pytest.mark.parametrize("same", [True, False])
def test_tied_weights_stored_twice(same: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_random_model("llama", tmp_path / "m")
    if same:
        changed(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    checkpoint = load(folder)
    model = trace.build(checkpoint.model_class, checkpoint.config, torch.float32, "meta")
    with caplog.at_level(logging.WARNING, "inferc"):
        bind(model, checkpoint)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == same
    assert ("kept apart" in caplog.text) != same


@pytest.mark.slow
def test_layers_that_the_class_declares_ignorable_are_listed(tmp_path: Path) -> None:
    """DeepSeek V3 stores a layer more, which predicts a second token."""
    family = FAMILIES["deepseek_v3"]
    folder = make_random_model("deepseek_v3", tmp_path / "m", **family.fields)
    tensors = load_file(folder / "model.safetensors")
    extra = "model.layers.61.eh_proj.weight"
    save_file({**tensors, extra: torch.zeros(4, 4)}, folder / "model.safetensors", metadata={"format": "pt"})
    assert export_model(load(folder), "float32").info.ignored_tensors == [extra]
    save_file({**tensors, extra.replace("61", "7"): torch.zeros(4, 4)}, folder / "model.safetensors")
    with pytest.raises(ArtifactError, match=r"tensor model.layers.7.eh_proj.weight has no use"):
        export_model(load(folder), "float32")
