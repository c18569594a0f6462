"""The MTP layers of a checkpoint: layers behind the last one of config.json, or tensors in a part of their own."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import count
from typing import Any

PART = re.compile(r"^(model\.)?mtp\.")
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
JOINED = ".eh_proj."  # the product that joins a token and a row, which no layer of a model has


def mtp_layers(config: Any, names: Iterable[str]) -> list[list[str]]:
    """Return the names of the tensors of each MTP layer of a checkpoint.

    All tensors of a part of their own are taken for those of one layer.
    """
    layers: dict[int, list[str]] = {}
    part = []
    for name in names:
        if PART.match(name):
            part.append(name)
        elif (number := LAYER.search(name)) is not None:
            layers.setdefault(int(number[1]), []).append(name)
    found = [part] if part else []
    for layer in count(int(getattr(config, "num_hidden_layers", 0))):
        if not any(JOINED in name for name in layers.get(layer, ())):
            break
        found.append(layers[layer])
    return found
