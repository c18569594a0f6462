"""Rope whose frequencies depend on the sequence's length, fixed for one length at compile time.

transformers recomputes these frequencies while it runs, from the longest position so far. K that is cached was rotated
with the frequencies of its day, so a server would mix them; a compiled model has one set, for `max_model_len`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inferc.errors import UnsupportedError

Overrides = dict[str, Tensor]  # buffer name -> its fixed value, on the CPU


def fix_rope(model: Any, max_model_len: int) -> tuple[Overrides, list[dict[str, Any]]]:
    """Fix every length-dependent rope of `model`, in place, for sequences of up to `max_model_len` tokens.

    Returns the values of its frequency buffers and a record for people: module, kind, length.
    Raises UnsupportedError for a kind of rope whose frequencies depend on length in an unknown way.
    """
    overrides: Overrides = {}
    records = []
    for path, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        if kinds is None:
            continue
        by_layer = dict(kinds) if isinstance(kinds, dict) else {None: kinds}
        for layer_type, kind in by_layer.items():
            if not _depends_on_length(str(kind)):
                continue
            buffer = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
            value = _frequencies(module, str(kind), layer_type, max_model_len, path)
            overrides[f"{path}.{buffer}" if path else buffer] = value
            if not getattr(module, buffer).is_meta:
                getattr(module, buffer).copy_(value)
            records.append({"module": path, "kind": str(kind), "max_model_len": max_model_len})
            by_layer[layer_type] = "default"  # the forward pass then leaves the buffer alone
        module.rope_type = by_layer if isinstance(kinds, dict) else by_layer[None]
    return overrides, records


def _depends_on_length(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def _frequencies(module: Any, kind: str, layer_type: str | None, max_model_len: int, path: str) -> Tensor:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind not in ROPE_INIT_FUNCTIONS:
        raise UnsupportedError(
            f"{path}: rope of kind {kind} depends on length in a way not known here; expected dynamic"
        )
    keywords = {} if layer_type is None else {"layer_type": layer_type}
    value, _ = ROPE_INIT_FUNCTIONS[kind](module.config, torch.device("cpu"), seq_len=max_model_len, **keywords)
    return value.to(torch.float32)
