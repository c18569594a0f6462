"""Small random models whose checkpoints carry MTP layers, and the drafts that transformers' own code makes of them.

The layers lie in the checkpoint as their makers publish them: behind the last layer of config.json, or as `mtp.`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.modeling_layers
from families import FAMILIES, GROUPS, LATENT, ROUTED
from random_models import make_random_model
from safetensors.torch import load_file, save_file
from torch import Tensor

needs_mtp = pytest.mark.skipif(
    not hasattr(transformers.modeling_layers, "MtpModel"), reason="this transformers has no code of MTP layers"
)
LISTS = ("layer_types", "mlp_layer_types")
NUM_LAYERS = 2
LAST = re.compile(r"\.(o_proj|down_proj)\.weight$")  # what a layer adds to its rows goes through one of these
SMALL = 0.01
OVERRIDES: dict[str, dict[str, Any]] = {
    "mellum": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "sliding_window": 24,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "glm4_moe_lite": {**LATENT, **ROUTED, **GROUPS},
}


def make_mtp_model(
    family: str, folder: Path, *, num_mtp: int = 1, seed: int = 0, is_right: bool = False, **overrides: Any
) -> Path:
    """Write a random model of two layers with that many MTP layers behind them, and return its folder.

    An MTP layer has a decoder layer of the model in it, so the model is made with more layers, and the last of them
    get what an MTP layer has besides. is_right: all layers do little, so that a token follows mostly from the one in
    front of it, and the MTP layer hands the token on: it then drafts what the model chooses more often than not.
    """
    own = FAMILIES[family].fields if family in FAMILIES else OVERRIDES[family]
    fields = {**own, **overrides, "num_hidden_layers": NUM_LAYERS + num_mtp}
    make_random_model(family, folder, seed=seed, **fields)
    config = json.loads((folder / "config.json").read_text())
    size = config["hidden_size"]
    config["num_hidden_layers"] = NUM_LAYERS
    config["num_nextn_predict_layers"] = num_mtp
    config.pop("num_mtp_layers", None)
    for name in LISTS:
        if config.get(name) is not None:
            config[name] = config[name][:NUM_LAYERS]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    random = torch.Generator().manual_seed(seed + 1)

    def norm() -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=random)

    for number in range(NUM_LAYERS, NUM_LAYERS + num_mtp):
        layer = f"model.layers.{number}"
        for name in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"{layer}.{name}.weight"] = norm()
        tensors[f"{layer}.eh_proj.weight"] = 0.15 * torch.randn(size, 2 * size, generator=random)
        if is_right:
            tensors[f"{layer}.eh_proj.weight"] = torch.eye(size, 2 * size)
            tensors[f"{layer}.enorm.weight"] = torch.ones(size)
            tensors[f"{layer}.shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
        # Published layers have copies of what they share with the model.
        tensors[f"{layer}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{layer}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    if is_right:
        tensors = {name: each * (SMALL if LAST.search(name) else 1) for name, each in tensors.items()}
    if family == "mellum":
        tensors = {_of_mellum(name): each for name, each in tensors.items() if "layers.2.embed" not in name}
        tensors.pop("mtp.layers.0.shared_head.head.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _of_mellum(name: str) -> str:
    """Return the name that a tensor of the MTP layer has in the one family that keeps it in a part of its own."""
    name = name.replace("model.layers.2.", "mtp.layers.0.")
    for ours, theirs in (
        ("enorm", "pre_fc_norm_embedding"),
        ("hnorm", "pre_fc_norm_hidden"),
        ("eh_proj", "fc"),
        ("shared_head.norm", "norm"),
    ):
        name = name.replace(f"mtp.layers.0.{ours}.", f"mtp.{theirs}.")
    return name


class MtpOracle:
    """The MTP layers of a folder by transformers' own MtpModel, without a cache: each draft computes its whole text."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self.model.eval()
        if self.model.config.model_type != "mellum":  # their patterns are for the sizes that are published
            self.model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2.*"]
        config = self.model.config
        for name in LISTS:  # of families whose MTP layers transformers does not know: they are like the last layer
            if getattr(config, name, None) is not None and getattr(config, f"mtp_{name}", None) is None:
                setattr(config, f"mtp_{name}", getattr(config, name)[-1:])
        config.num_mtp_layers = 1  # the first is the one that drafts
        self.mtp: Any = transformers.modeling_layers.MtpModel.from_pretrained(self.model).eval()

    @torch.no_grad()
    def rows(self, tokens: Sequence[int]) -> Tensor:
        """Return what the model makes of a text, as transformers hands it to its MTP layers."""
        found: Tensor = self.model(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states[-1]
        return found

    @torch.no_grad()
    def firsts(self, tokens: Sequence[int]) -> list[int]:
        """Return what is drafted first behind each two tokens or more of a text: the layer is causal."""
        places = torch.arange(1, len(tokens))[None]
        text = torch.tensor([list(tokens[1:])])
        made = self.mtp.forward_layer(0, self.rows(tokens[:-1]), places, None, input_ids=text)
        found: list[int] = self.mtp._project_to_logits(made)[0].argmax(-1).tolist()
        return found

    @torch.no_grad()
    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """Draft greedily behind all tokens; from the second draft on, the layer goes on with rows of its own."""
        rows, text, drafted = self.rows(tokens[:-1]), list(tokens[1:]), list[int]()
        for _ in range(count):
            places = torch.arange(1, len(text) + 1)[None]
            made = self.mtp.forward_layer(0, rows, places, None, input_ids=torch.tensor([text]))
            logits = self.mtp._project_to_logits(made[:, -1:])
            drafted.append(int(logits[0, -1].argmax()))
            text.append(drafted[-1])
            rows = torch.cat((rows, made[:, -1:]), 1)
        return drafted
