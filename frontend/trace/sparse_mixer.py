"""The capture of routers that weigh each expert by a softmax over those near it (Phi-3.5-MoE), at module level.

Their code handles one expert after the other with masks and scatters; in inference it is `inferc.moe_routing` with
"near_softmax". The check of a capture runs the code itself, and so proves that the two agree.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from torch import Tensor

MIXER, JITTER = "sparsemixer", "router_jitter_noise"  # the function that such a router calls, and what it passes


def use(model: Any) -> None:
    """Replace the forward pass of every sparse-mixer router in `model`."""
    for module in model.modules():
        if is_mixer(module):
            module.forward = types.MethodType(_forward, module)


def is_mixer(module: Any) -> bool:
    """Tell whether a module is a router with a sparse mixer, by what it calls and has, not by its name."""
    mixer = getattr(sys.modules[type(module).__module__], MIXER, None)
    return mixer is not None and isinstance(module, torch.nn.Linear) and hasattr(module, JITTER)


def _forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = torch.nn.functional.linear(hidden_states, self.weight, self.bias)
    margin = 2.0 * float(getattr(self, JITTER))
    ids, weights = torch.ops.inferc.moe_routing.default(
        logits, None, 2, False, "near_softmax", 1.0, 1, 1, "max", margin
    )
    return logits, weights, ids
