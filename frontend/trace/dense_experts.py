"""The replacement of experts that run on every token, with weight 0 for those not chosen (Llama 4), at module level.

Such a block scales each expert's input by the sigmoid of the router's logit if the expert was chosen, and by 0
otherwise; an expert without biases then gives 0. So only the chosen experts need to run: one `inferc.moe_experts` whose
weights scale inputs.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch
from torch import Tensor

PARTS = ("router", "experts", "shared_expert")


def use(model: Any) -> None:
    """Replace the forward pass of every block of dense experts in `model`."""
    for module in model.modules():
        if is_dense(module):
            module.forward = types.MethodType(_forward, module)


def is_dense(module: Any) -> bool:
    """Tell by its parts, not by its name, whether a block's experts take only the tokens, already scaled."""
    parts: list[Any] = [getattr(module, name, None) for name in PARTS]
    if any(part is None for part in parts):
        return False
    router, experts, _ = parts
    takes = list(inspect.signature(type(experts).forward).parameters)
    weights = all(isinstance(getattr(experts, name, None), Tensor) for name in ("gate_up_proj", "down_proj"))
    silu = type(getattr(experts, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
    return isinstance(router, torch.nn.Linear) and weights and silu and takes == ["self", "hidden_states"]


def _forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
    logits = torch.nn.functional.linear(hidden, self.router.weight)
    best, ids = torch.topk(logits, self.top_k, dim=-1)
    weights = torch.sigmoid(best.float())
    gate_up, down = self.experts.gate_up_proj.transpose(1, 2), self.experts.down_proj.transpose(1, 2)
    routed = torch.ops.inferc.moe_experts.default(
        hidden, ids, weights, gate_up, down, None, None, "silu", 1.0, 0.0, True
    )
    return self.shared_expert(hidden) + routed, logits
