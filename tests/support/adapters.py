"""LoRA adapters as PEFT saves them, made of random numbers, and models that they are merged into."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

EMBEDDINGS = ("embed_tokens", "embed_in")
CONV1D = ("c_attn", "c_proj", "c_fc")  # modules of GPT-2 whose stored matrices are [inputs, outputs]
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def modules_of(model: Path, targets: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the modules of a checkpoint whose names end in one of `targets`, with their (outputs, inputs)."""
    tensors = load_file(model / "model.safetensors")
    found = {
        name.removesuffix(".weight"): _shape(value.T if name.split(".")[-2] in CONV1D else value)
        for name, value in tensors.items()
        if name.endswith(".weight") and name.removesuffix(".weight").rpartition(".")[2] in targets
    }
    if "lm_head" in targets and "lm_head.weight" not in tensors:
        found["lm_head"] = _shape(tensors["model.embed_tokens.weight"])
    return found


def _shape(value: Tensor) -> tuple[int, int]:
    return int(value.shape[0]), int(value.shape[1])


def write_adapter(
    folder: Path,
    model: Path,
    *,
    rank: int = 4,
    alpha: float = 8,
    targets: Sequence[str] = ALL_LINEAR,
    seed: int = 0,
    size: float = 0.5,
    dtype: torch.dtype = torch.float32,
    ranks: Mapping[str, int] | None = None,
    layers: Sequence[int] | None = None,
    **config: Any,
) -> Path:
    """Write an adapter for the checkpoint in the folder `model`, and return its folder.

    size: that of what it adds beside the weights of a layer that keeps the size of its rows. ranks: of modules whose
    name ends so. layers: those that it changes; all if not given. config: more fields of adapter_config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for module, (outputs, inputs) in sorted(modules_of(model, targets).items()):
        if layers is not None and not any(f".{layer}." in module for layer in layers):
            continue
        own = (ranks or {}).get(module.rpartition(".")[2], rank)
        is_embedding = module.endswith(EMBEDDINGS)
        taken, given = (outputs, inputs) if is_embedding else (inputs, outputs)
        a = torch.randn(own, taken, generator=generator) * (1.0 if is_embedding else taken**-0.5)
        b = torch.randn(given, own, generator=generator) * (size * (0.05 if is_embedding else 1.0) * own**-0.5)
        names = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A.weight", "lora_B.weight")
        for name, value in zip(names, (a, b), strict=True):
            tensors[f"base_model.model.{module}.{name}"] = value.to(dtype).contiguous()
    facts = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": sorted(targets), **config}
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merge(model: Path, adapter: Path, out: Path) -> Path:
    """Write the checkpoint with the adapter added to its weights, in float32, by the definition of LoRA."""
    shutil.copytree(model, out)
    config = json.loads((adapter / "adapter_config.json").read_text())
    weights = {name: value.float() for name, value in load_file(model / "model.safetensors").items()}
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, a in tensors.items():
        for mark, other in ((".lora_A.weight", ".lora_B.weight"), (".lora_embedding_A", ".lora_embedding_B")):
            if not name.endswith(mark):
                continue
            module = name.removesuffix(mark).removeprefix("base_model.model.")
            alpha = config.get("alpha_pattern", {}).get(module.rpartition(".")[2], config["lora_alpha"])
            scale = alpha / (len(a) ** 0.5 if config.get("use_rslora") else len(a))
            delta = tensors[name.removesuffix(mark) + other].float() @ a.float() * scale
            if module == "lm_head" and "lm_head.weight" not in weights:  # it is tied, and is not any more
                weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
                facts = json.loads((out / "config.json").read_text())
                (out / "config.json").write_text(json.dumps({**facts, "tie_word_embeddings": False}))
            is_turned = "embedding" in mark or module.rpartition(".")[2] in CONV1D
            weights[f"{module}.weight"] = weights[f"{module}.weight"] + (delta.T if is_turned else delta)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


FOLDERS = {"everything": "a", "attention": "b", "layer": "c", "rooted": "d"}
"""The folders of the adapters of `make_adapted`, by their names."""


def make_adapted(model: Path, folder: Path) -> None:
    """Make artifacts of a model with room for adapters, four adapters, and the models that these are merged into.

    The adapters are of all modules, of some, of one layer, and one that is scaled by the root of its rank.
    """
    from inferc import CompileConfig
    from inferc.compiler.build import compile

    compile(model, folder / "cpu", CompileConfig(certify="none", adapter_rank=16))
    compile(model, folder / "reference", CompileConfig("reference", certify="none", adapter_rank=16))
    everything = (*ALL_LINEAR, "embed_tokens", "lm_head")
    made = folder / "adapters"
    write_adapter(made / "a", model, rank=8, targets=everything, seed=1, ranks={"q_proj": 5})
    write_adapter(made / "b", model, rank=3, targets=("q_proj", "v_proj"), seed=2)
    write_adapter(made / "c", model, rank=1, alpha=2, seed=3, layers=[1])
    write_adapter(made / "d", model, rank=16, seed=4, use_rslora=True, alpha_pattern={"down_proj": 3.0})
    for name, each in FOLDERS.items():
        merge(model, made / each, folder / "merged" / name)


def adapter_options(adapted: Path) -> list[str]:
    """Return the adapters of `make_adapted` as options, each NAME=PATH."""
    return [f"{name}={adapted / 'adapters' / folder}" for name, folder in FOLDERS.items()]
