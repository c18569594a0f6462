"""The values of buffers that no checkpoint stores, such as rope's frequencies, as transformers computes them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from inferc.frontend.trace import torch_export as trace


def unsaved_buffers(module: Any) -> list[str]:
    """Return the names of a module's buffers that no checkpoint stores."""
    return sorted(name for name in module._non_persistent_buffers_set if module._buffers.get(name) is not None)


def initial_buffers(model: Any, path: str) -> dict[str, Tensor]:
    """Return the values on the CPU that transformers gives the unsaved buffers of a submodule.

    Buffers for which it computes no value are absent. The values come from `_init_weights` of the model that the
    submodule belongs to, which transformers also runs after loading.
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
        _owner(model, path)._init_weights(twin)  # it also sets the parameters, which are on the meta device
    return {
        name: value
        for name, value in twin._buffers.items()
        if not torch.equal(value, before[name]) and not value.isnan().any()
    }


def _owner(model: Any, path: str) -> Any:
    """Return the innermost transformers model around a module, whose `_init_weights` knows the module."""
    parts = path.split(".")
    around = (model.get_submodule(".".join(parts[:count])) for count in range(len(parts), 0, -1))
    return next((each for each in around if hasattr(each, "_init_weights")), model)
