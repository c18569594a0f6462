"""Buffers that no checkpoint stores, rope's frequencies above all: what transformers makes them when it loads a model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from inferc.frontend.trace import torch_export as trace


def unsaved_buffers(module: Any) -> list[str]:
    """The names of a module's buffers that no checkpoint stores."""
    return sorted(name for name in module._non_persistent_buffers_set if module._buffers.get(name) is not None)


def initial_buffers(model: Any, path: str) -> dict[str, Tensor]:
    """The values that transformers gives the unsaved buffers of a submodule, on the CPU; without those that it computes none for.

    They are made by the `_init_weights` of the model that the submodule belongs to, which runs after loading, too.
    """
    module = model.get_submodule(path)
    names = unsaved_buffers(module)
    if not names:
        return {}
    twin = copy.copy(module)
    twin._buffers = {}
    for name in names:
        old = module._buffers[name]
        empty = float("nan") if old.is_floating_point() else 1 if old.dtype == torch.bool else -7
        twin._buffers[name] = torch.full(old.shape, empty, dtype=old.dtype)
    before = {name: value.clone() for name, value in twin._buffers.items()}
    with trace.quiet(), torch.no_grad():
        _owner(model, path)._init_weights(twin)  # its parameters too, which are on the meta device
    return {
        name: value
        for name, value in twin._buffers.items()
        if not torch.equal(value, before[name]) and not value.isnan().any()
    }


def _owner(model: Any, path: str) -> Any:
    """The innermost transformers model around a module: the one whose `_init_weights` knows it."""
    parts = path.split(".")
    around = (model.get_submodule(".".join(parts[:count])) for count in range(len(parts), 0, -1))
    return next((each for each in around if hasattr(each, "_init_weights")), model)
