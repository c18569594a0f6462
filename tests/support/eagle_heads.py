"""Heads with random weights for small models, and an oracle of them in plain PyTorch.

The oracle is written from the published description (Li et al. 2025, arXiv:2503.01840), over whole sequences and
without a cache. It shares no code with the head that is compiled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LAYER = "layers.0."
OF_LAYER = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "hidden_act",
)


def make_head(
    folder: Path,
    model: Path,
    *,
    form: str = "speculators",
    num_drafted: int | None = None,
    layers: Sequence[int] = (1, 2, 3),
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    left_out: Sequence[str] = (),
    **fields: Any,
) -> Path:
    """Write a random head for the model of a folder, in one of the two published forms, and return the folder.

    num_drafted: how many of the model's tokens it can draft; None: all. left_out: tensors that are not written. fields:
    of config.json, outside of the layer.
    """
    of = json.loads((model / "config.json").read_text())
    size, inner, vocab = of["hidden_size"], of["intermediate_size"], of["vocab_size"]
    heads, kv_heads, dim = of["num_attention_heads"], of["num_key_value_heads"], of["head_dim"]
    count = vocab if num_drafted is None else num_drafted
    random = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=random).mul_(1.4 * columns**-0.5)

    def norm(width: int = size) -> Tensor:
        return 1 + 0.2 * torch.randn(width, generator=random)

    given = len(layers) * size
    tensors = {
        "fc.weight": matrix(size, given),
        f"{LAYER}input_layernorm.weight": norm(),
        f"{LAYER}hidden_norm.weight": norm(),
        f"{LAYER}post_attention_layernorm.weight": norm(),
        f"{LAYER}self_attn.q_proj.weight": matrix(heads * dim, 2 * size),
        f"{LAYER}self_attn.k_proj.weight": matrix(kv_heads * dim, 2 * size),
        f"{LAYER}self_attn.v_proj.weight": matrix(kv_heads * dim, 2 * size),
        f"{LAYER}self_attn.o_proj.weight": matrix(size, heads * dim),
        f"{LAYER}mlp.gate_proj.weight": matrix(inner, size),
        f"{LAYER}mlp.up_proj.weight": matrix(inner, size),
        f"{LAYER}mlp.down_proj.weight": matrix(size, inner),
        "norm.weight": norm(),
        "lm_head.weight": 3 * matrix(count, size),
    }
    if fields.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(given)
    tensors = {name: each.to(dtype) for name, each in tensors.items()}
    if num_drafted is not None:
        ids = torch.randperm(vocab, generator=random)[:count].sort().values
        tensors["d2t"] = ids - torch.arange(count)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, value=True)
    layer = {key: of[key] for key in OF_LAYER if key in of} | {"model_type": "llama", "num_hidden_layers": 1}
    others = {"draft_vocab_size": count, "eagle_aux_hidden_state_layer_ids": list(layers), **fields}
    if form == "speculators":
        config = {"speculators_model_type": "eagle3", "transformer_layer_config": layer, **others}
    else:
        config = {**layer, "architectures": ["LlamaForCausalLMEagle3"], **others}
        tensors = {name.replace(LAYER, "midlayer."): each for name, each in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: each for name, each in tensors.items() if name not in left_out}, folder / "model.safetensors")
    return folder


@dataclass
class HeadOracle:
    """A head as its description has it: `weights` by their published names, in float32."""

    weights: dict[str, Tensor]
    config: dict[str, Any]
    embedding: Tensor

    @staticmethod
    def of(folder: Path, embedding: Tensor) -> HeadOracle:
        """Read a head's folder. embedding: the model's."""
        stored = load_file(folder / "model.safetensors")
        found = {name.replace("midlayer.", LAYER): each for name, each in stored.items()}
        weights = {name: each.float() if each.is_floating_point() else each for name, each in found.items()}
        config = json.loads((folder / "config.json").read_text())
        return HeadOracle(weights, {**config, **config.get("transformer_layer_config", {})}, embedding.float())

    @property
    def ids(self) -> Tensor:
        """The model's ids of the tokens that are drafted."""
        order = torch.arange(len(self.weights["lm_head.weight"]))
        return order + self.weights["d2t"] if "d2t" in self.weights else order

    def join(self, states: Tensor) -> Tensor:
        """Return the rows [T, hidden_size] that the layer reads, of those of several layers side by side."""
        if self.config.get("norm_before_fc"):
            states = self._norm(states, "input_norm")
        return states @ self.weights["fc.weight"].T

    def run(self, tokens: Sequence[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits, and the rows by which it goes on; row i is of token i beside row i of `hidden`."""
        config, count = self.config, len(tokens)
        heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        normed = self._norm(hidden, f"{LAYER}hidden_norm")
        embeds = self._norm(self.embedding[list(tokens)], f"{LAYER}input_layernorm")
        both = torch.cat((embeds, normed), -1)
        q, k, v = (self._product(both, f"{LAYER}self_attn.{name}_proj").view(count, -1, dim) for name in "qkv")
        q, k = self._rotate(q), self._rotate(k)
        k, v = (each.repeat_interleave(heads // kv_heads, 1) for each in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k) * dim**-0.5
        scores = scores.masked_fill(torch.ones(count, count, dtype=torch.bool).triu(1), -torch.inf)
        attended = torch.einsum("hts,shd->thd", scores.softmax(-1), v).reshape(count, -1)
        residual = normed if config.get("norm_before_residual", "speculators_model_type" in config) else hidden
        hidden = residual + self._product(attended, f"{LAYER}self_attn.o_proj")
        inner = self._norm(hidden, f"{LAYER}post_attention_layernorm")
        gate, up = (self._product(inner, f"{LAYER}mlp.{name}_proj") for name in ("gate", "up"))
        hidden = hidden + self._product(torch.nn.functional.silu(gate) * up, f"{LAYER}mlp.down_proj")
        last = self._norm(hidden, "norm")
        return self._product(last, "lm_head"), last if config.get("norm_output") else hidden

    def draft(self, tokens: Sequence[int], states: Tensor, count: int) -> tuple[list[int], list[Tensor]]:
        """Draft greedily behind all `tokens`; return the ids, and the logits of each.

        states: the rows of several layers side by side, for all tokens but the last.
        """
        text, hidden = list(tokens[1:]), self.join(states)
        drafted, found = [], []
        for _ in range(count):
            logits, own = self.run(text, hidden)
            found.append(logits[-1])
            drafted.append(int(self.ids[logits[-1].argmax()]))
            text.append(drafted[-1])
            hidden = torch.cat((hidden, own[-1:]))
        return drafted, found

    def _product(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        mean = x.pow(2).mean(-1, keepdim=True)
        normed: Tensor = x * (mean + float(self.config["rms_norm_eps"])).rsqrt() * self.weights[f"{name}.weight"]
        return normed

    def _rotate(self, x: Tensor) -> Tensor:
        count, _, dim = x.shape
        angles = torch.arange(count)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = x[..., : dim // 2], x[..., dim // 2 :]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def states_of(model: Any, tokens: Sequence[int], layers: Sequence[int]) -> Tensor:
    """Return what enters some layers of transformers' model, side by side: [T, len(layers) * hidden_size]."""
    with torch.no_grad():
        states = model(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in layers], -1).float()


def train_head(folder: Path, model: Any, texts: Sequence[Sequence[int]], depth: int = 3, steps: int = 120) -> None:
    """Teach the head of a folder some texts by heart, on the model's rows and on its own, `depth` tokens ahead."""
    oracle = HeadOracle.of(folder, model.get_input_embeddings().weight.detach())
    layers = oracle.config["eagle_aux_hidden_state_layer_ids"]
    parameters = [each.requires_grad_() for each in oracle.weights.values() if each.is_floating_point()]
    optimizer = torch.optim.Adam(parameters, 3e-3)
    place = {int(token): row for row, token in enumerate(oracle.ids)}
    given = [(list(text), states_of(model, text[:-1], layers)) for text in texts]
    for _ in range(steps):
        loss = torch.zeros(())
        for text, states in given:
            hidden = oracle.join(states)
            for ahead in range(depth):
                # Row i has the token ahead + i + 1 and predicts the one behind it.
                tokens = text[ahead + 1 : -1]
                logits, own = oracle.run(tokens, hidden[: len(tokens)])
                wanted = torch.tensor([place.get(token, -100) for token in text[ahead + 2 :]])
                loss = loss + torch.nn.functional.cross_entropy(logits, wanted)
                hidden = own
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    stored = load_file(folder / "model.safetensors")
    for name in stored:
        ours = oracle.weights[name.replace("midlayer.", LAYER)]
        stored[name] = ours.detach().to(stored[name].dtype).contiguous()
    save_file(stored, folder / "model.safetensors")
