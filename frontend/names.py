"""Stable names of modules, weights and nodes: the same in every model family, so that no pass depends on one."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import torch

ATTENTION_NAMES = {"self_attn", "attn", "self_attention", "attention"}


class Names:
    """The map to stable names: `model.layers.3.self_attn.q_proj` is `layers.3.attention.q_proj` in every family."""

    def __init__(self, model: Any) -> None:
        count = int(model.config.num_hidden_layers)
        lists = [
            path
            for path, module in model.named_modules()
            if isinstance(module, torch.nn.ModuleList) and len(module) == count and not re.search(r"\.\d+\.", path)
        ]
        self.layers = min(lists, key=len, default="layers")
        self.prefix = self.layers.rpartition(".")[0]
        self.counts: Counter[str] = Counter()

    def stable(self, path: str) -> tuple[str, int | None]:
        """Return the stable form of a module's or parameter's path, and its layer."""
        layer = None
        if path == self.layers or path.startswith(self.layers + "."):
            path = "layers" + path[len(self.layers) :]
            match = re.match(r"layers\.(\d+)", path)
            layer = int(match.group(1)) if match else None
        elif self.prefix and (path == self.prefix or path.startswith(self.prefix + ".")):
            path = path[len(self.prefix) :].lstrip(".")
        parts = ["attention" if part in ATTENTION_NAMES else part for part in path.split(".")]
        return ".".join(parts), layer

    def moved(self, path: str, step: int) -> str:
        """Return the path moved by `step` layers; a path outside of layers stays."""
        match = re.match(rf"({re.escape(self.layers)}\.)(\d+)(?=\.|$)", path) if step else None
        return f"{match[1]}{int(match[2]) + step}{path[match.end() :]}" if match else path

    def unique(self, name: str) -> str:
        """Return `name`, with a number appended from its second use on."""
        self.counts[name] += 1
        return name if self.counts[name] == 1 else f"{name}_{self.counts[name] - 1}"
