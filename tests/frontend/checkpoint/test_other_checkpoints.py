"""Checkpoints whose tensors have other names than the model's: what transformers loads is bound, the rest is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from random_models import make_random_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from inferc.errors import ArtifactError, ExportError, UnsupportedError
from inferc.frontend.check import check_attention_count
from inferc.frontend.checkpoint.bind import Binding, bind
from inferc.frontend.checkpoint.load import Checkpoint, check_config, load
from inferc.frontend.export import export_model
from inferc.frontend.trace import torch_export as trace
from inferc.ir.weights import read_whole

Tensors = dict[str, Tensor]
MASK = torch.ones(1, 1, 8, 8).tril()


def changed(family: str, folder: Path, change: Callable[[Tensors], Tensors], **fields: Any) -> Path:
    make_random_model(family, folder, num_hidden_layers=1, **fields)
    tensors = {name: value.contiguous() for name, value in change(load_file(folder / "model.safetensors")).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def bound(folder: Path) -> tuple[Checkpoint, Binding]:
    checkpoint = load(folder)
    model = trace.build(checkpoint.model_class, checkpoint.config, torch.float32, "meta")
    return checkpoint, bind(model, checkpoint)


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {
        new + name.removeprefix(old) if name.startswith(old) else name: value for name, value in tensors.items()
    }


def extended(more: Tensors) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, **more}


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {each: value for each, value in tensors.items() if each != name}


@pytest.mark.parametrize(
    ("family", "change", "ignored"),
    [
        ("llama", renamed("model.", ""), 0),  # saved from the base model
        ("llama", renamed("model.", "model.model."), 0),
        ("gpt2", renamed("transformer.", ""), 0),  # as the first checkpoints on the hub
        (
            "gpt2",
            extended({"transformer.h.0.attn.bias": MASK, "transformer.h.0.attn.masked_bias": torch.tensor(-1e4)}),
            2,
        ),
        ("gpt_bigcode", extended({"transformer.h.0.attn.bias": MASK.bool()}), 1),
        (
            "gpt_neox",
            extended(
                {
                    "gpt_neox.layers.0.attention.bias": MASK,
                    "gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9),
                    "gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(8),
                }
            ),
            3,
        ),
        ("llama", extended({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}), 1),
        ("codegen", extended({"transformer.h.0.attn.causal_mask": MASK.bool()}), 1),
        # Heads of other tasks, as BERT's and embedding models' files have them.
        ("llama", extended({"model.pooler.dense.weight": torch.ones(8, 8), "score.weight": torch.ones(2, 64)}), 2),
        ("llama", extended({"v_head.summary.weight": torch.ones(1, 64), "v_head.summary.bias": torch.ones(1)}), 2),
    ],
)
def test_what_transformers_loads_is_bound(
    family: str, change: Callable[[Tensors], Tensors], ignored: int, tmp_path: Path
) -> None:
    checkpoint, binding = bound(changed(family, tmp_path / "m", change))
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", output_loading_info=True)
    model, told = loaded
    assert not told["missing_keys"]
    assert len(binding.ignored) == ignored
    for name, value in model.state_dict().items():
        assert torch.equal(read_whole(binding.weights[name], checkpoint.reader), value), name


def test_a_bias_that_is_no_mask_is_not_ignored(tmp_path: Path) -> None:
    folder = changed("llama", tmp_path / "m", extended({"model.layers.0.self_attn.bias": torch.zeros(64)}))
    with pytest.raises(ArtifactError, match=r"tensor model.layers.0.self_attn.bias has no use in LlamaForCausalLM"):
        bound(folder)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            renamed("model.", "language_model.model."),
            ArtifactError,
            (
                "the file's tensors begin with `language_model.`, where the model's begin with `model.`: they are of"
                " another"
            ),
        ),
        (
            lambda tensors: {f"base.{name}": value for name, value in tensors.items()},
            ArtifactError,
            "the file's tensors begin with `base.`, where the model's begin with `model.`",
        ),
        (
            lambda tensors: {f"_orig_mod.{name}": value for name, value in tensors.items()},
            ArtifactError,
            "tensor _orig_mod.lm_head.weight and 11 more: `_orig_mod.` is the wrapper of torch.compile; strip it from"
            " the names," + " or save the module inside it",
        ),
        (
            lambda tensors: {f"module.{name}": value for name, value in tensors.items()},
            ArtifactError,
            "tensor module.lm_head.weight and 11 more: `module.` is the wrapper of DistributedDataParallel; strip it",
        ),
        (
            lambda tensors: {f"module._orig_mod.{name}": value for name, value in tensors.items()},
            ArtifactError,
            (
                "`_orig_mod.` is the wrapper of torch.compile and `module.` is the wrapper of DistributedDataParallel;"
                " strip"
            ),
        ),
        (
            renamed("model.layers.0.", "model.layers.0._orig_mod."),  # compiled a layer at a time
            ArtifactError,
            (
                "tensor model.layers.0._orig_mod.input_layernorm.weight and 8 more: `_orig_mod.` is the wrapper of"
                " torch.compile"
            ),
        ),
        (
            without("lm_head.weight"),
            ArtifactError,
            (
                "no tensor for lm_head.weight, the LM head, which config.json does not tie .* random numbers for it;"
                " set tie"
            ),
        ),
        (
            lambda tensors: renamed("model.", "")(without("lm_head.weight")(tensors)),  # as base models are saved
            ArtifactError,
            "no tensor for lm_head.weight, the LM head",
        ),
        (
            lambda tensors: renamed("model.", "")(without("model.norm.weight")(tensors)),
            ArtifactError,
            "no tensor for model.norm.weight; the checkpoint is incomplete",
        ),
        (
            without("model.norm.weight"),
            ArtifactError,
            "no tensor for model.norm.weight; .* is a file of it missing, or is config.json another's",
        ),
        (
            extended(
                {
                    f"model.layers.0.mlp.up_proj.{part}": torch.zeros(4, dtype=torch.int32)
                    for part in ("qweight", "qzeros", "g_idx")
                }
            ),
            UnsupportedError,
            "up_proj.g_idx: a GPTQ checkpoint, whose packed weights are not read yet; use the original",
        ),
        (
            extended({"model.layers.0.mlp.up_proj.qweight": torch.zeros(4, dtype=torch.int32)}),
            UnsupportedError,
            "up_proj.qweight: a GPTQ or AWQ checkpoint",
        ),
        (
            extended({"model.layers.0.mlp.up_proj.weight.absmax": torch.zeros(4)}),
            UnsupportedError,
            "up_proj.weight.absmax: a bitsandbytes checkpoint",
        ),
        (
            extended({"model.layers.0.mlp.up_proj.weight_scale_inv": torch.zeros(1, 1)}),
            UnsupportedError,
            "up_proj.weight_scale_inv: an FP8 checkpoint",
        ),
        (
            extended({"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.zeros(4, 4)}),
            UnsupportedError,
            "lora_A.weight: a LoRA adapter; merge it into its model",
        ),
    ],
)
def test_what_it_does_not_load_is_told_by_what_it_is(
    change: Callable[[Tensors], Tensors], error: type[Exception], message: str, tmp_path: Path
) -> None:
    folder = changed("llama", tmp_path / "m", change)
    with pytest.raises(error, match=message) as caught:
        bound(folder)
    assert "\n" not in str(caught.value) and "again" not in str(caught.value)


def test_a_tied_head_is_not_missed(tmp_path: Path) -> None:
    folder = changed("llama", tmp_path / "m", without("lm_head.weight"), tie_word_embeddings=True)
    _, binding = bound(folder)
    assert binding.weights["lm_head.weight"] == binding.weights["model.embed_tokens.weight"]


STATEFUL: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"layer_types": ["attention"] * 2, "mamba_n_heads": 4, "mamba_d_head": 32},
    "bamba": {"attn_layer_indices": [0, 1], "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1},
    "lfm2": {"layer_types": ["full_attention"] * 2},
    "dbrx": {},
}


@pytest.mark.parametrize("name", STATEFUL)
def test_a_class_that_can_have_state_or_parts_of_a_config_is_asked_for_its_layers(name: str) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    check_config(transformers.AutoConfig.for_model(name, **{**sizes, **STATEFUL[name]}), {}, name)


def test_layers_with_two_attentions_or_none_are_named(tmp_path: Path) -> None:
    program = export_model(load(make_random_model("llama", tmp_path / "m", num_hidden_layers=5)), "float32", 64)
    attentions = [node for node in program.graph.nodes if "inferc.attention" in str(node.target)]
    for node, layer in zip(attentions[1:], (0, 4, 4, 3), strict=True):
        node.meta["layer"] = layer
    message = (
        "model: 5 attention nodes were captured in 5 layers, expected one in each, and layers 1, 2 have none, layers"
        " 0, 4 have 2; the model's code goes past"
    )
    with pytest.raises(ExportError, match=message):
        check_attention_count(program, "model")
    attentions[1].meta["layer"], attentions[2].meta["layer"] = 1, None
    with pytest.raises(ExportError, match="and layer 2 has none, 1 in no layer; the model"):
        check_attention_count(program, "model")
