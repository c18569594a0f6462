"""The capture of attention, masks and experts through transformers' own extension points.

While a model is traced, its attention function emits one `inferc.attention` and its experts function one
`inferc.moe_experts`. Its mask function makes no tensor but a description of the mask, which the model's code hands to
the attention function unchanged (masks.py handles code that does something else with it).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inferc.errors import UnsupportedError
from inferc.frontend.trace.masks import Mask
from inferc.ir import ops as _ops  # noqa: F401  (defines torch.ops.inferc)
from inferc.ir.ops.experts import ACTIVATIONS, activated

NAME = "inferc"

# Arguments that change no value here: the mask or the graph has what they say, or they concern training or output.
SILENT_ARGUMENTS = {
    "cache_position",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "deterministic",
    "is_causal",
    "layer_idx",
    "max_length_k",
    "max_length_q",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "sliding_window",
    "target_dtype",
    "use_cache",
}


def register() -> None:
    """Make `NAME` known to transformers as an attention, mask and experts implementation."""
    from transformers.integrations.moe import ExpertsInterface
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, describe_mask)
    ExpertsInterface.register(NAME, experts)


def use(model: Any) -> None:
    """Switch every part of `model` to the attention, mask and experts functions of this module."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation = NAME
            config._experts_implementation = NAME
        if hasattr(module, "_apply_gate") and getattr(module, "has_gate", True):
            module._inferc_gate = gate_of(module)  # computed before the trace, in which numbers cannot be compared


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Emit attention as transformers' attention function; see `inferc.attention` for the shapes."""
    where = f"{type(module).__name__} {getattr(module, 'layer_idx', '')}".strip()
    if not isinstance(attention_mask, Mask):
        raise UnsupportedError(
            f"{where}: its mask is {_describe(attention_mask)}; expected one made by transformers' masking_utils"
        )
    strange = [name for name, value in others.items() if value is not None and name not in SILENT_ARGUMENTS]
    if strange:
        raise UnsupportedError(
            f"{where}: asks for attention with {', '.join(strange)}, which inferc.attention does not have"
        )
    if key.shape[2] != query.shape[2]:
        raise UnsupportedError(f"{where}: attends to keys of another length than its queries; expected self-attention")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    out = torch.ops.inferc.attention.default(
        query, key, value, s_aux, scale, attention_mask.kind, attention_mask.window, float(softcap or 0.0)
    )
    return out, None


def describe_mask(
    *,
    mask_function: Callable[..., Any],
    q_length: Any = 0,
    dtype: torch.dtype = torch.float32,
    device: Any = None,
    config: Any = None,
    **_others: Any,
) -> Mask:
    """Describe the mask, as transformers' mask function, instead of making a tensor."""
    windows: dict[str, int] = {}
    causal = _walk(mask_function, windows, config)
    if not causal or len(windows) > 1:
        raise UnsupportedError(f"the mask {_name(mask_function)} is not causal, sliding or chunked")
    kind, window = next(iter(windows.items()), ("causal", 0))
    return Mask(kind, window, q_length, dtype, device)


def _walk(function: Callable[..., Any], windows: dict[str, int], config: Any) -> bool:
    """Tell whether `function` is causal, and put its windows into `windows`.

    It is judged by the closures of masking_utils that it is made of.
    """
    name = _name(function)
    closure = inspect.getclosurevars(function).nonlocals
    if name == "causal_mask_function":
        return True
    if name == "and_masks.<locals>.and_mask":
        parts = [_walk(part, windows, config) for part in closure["mask_functions"]]
        return any(parts)
    if name == "sliding_window_overlay.<locals>.inner_mask":
        windows["sliding"] = int(closure["sliding_window"])
        return False
    if name == "chunked_overlay.<locals>.inner_mask":
        windows["chunked"] = int(closure["chunk_size"])
        return False
    if name == "packed_sequence_mask_function.<locals>.inner_mask":
        return False  # it separates several sequences in one row of the batch; a traced row is one sequence
    if name in (
        "remap_positions_for_packed_sequence.<locals>.inner_mask",
        "add_offsets_to_mask_function.<locals>.inner_mask",
    ):
        return _walk(closure["mask_function"], windows, config)
    raise UnsupportedError(f"{_other_mask(name, config)}; expected causal, sliding or chunked attention")


def _other_mask(name: str, config: Any) -> str:
    """Return what a mask made with transformers' function `name` is, and which field of the config asks for it."""
    is_bidirectional = "bidirectional" in name
    values = {each: getattr(config, each, None) for each in ("use_bidirectional_attention", "is_causal", "is_decoder")}
    field = None
    if values["use_bidirectional_attention"]:
        field = "use_bidirectional_attention"
    elif values["is_causal"] is False:
        field = "is_causal"
    elif is_bidirectional and values["is_decoder"] is False:
        field = "is_decoder"
    if field is not None:
        return f"bidirectional attention ({field} is {json.dumps(values[field])} in its config)"
    return "bidirectional attention" if is_bidirectional else f"the model's mask is made with {name}"


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", function))


def _describe(mask: Any) -> str:
    return "absent" if mask is None else f"a {type(mask).__name__}"


def experts(module: Any, hidden: Tensor, expert_ids: Tensor, expert_weights: Tensor, *others: Any) -> Tensor:
    """Emit experts as transformers' experts function.

    hidden is [num_tokens, hidden_size]; ids and weights are [num_tokens, top_k].
    """
    where = type(module).__name__
    for found, what in (
        (bool(others), "more arguments than ids and weights"),
        (not getattr(module, "has_gate", True), "no gate"),
        (getattr(module, "has_post_expert_norm", False), "a norm after each expert"),
    ):
        if found:
            raise UnsupportedError(f"{where}: experts with {what}; inferc.moe_experts has gated experts")
    gate: Gate = module._inferc_gate
    gate_up, down = module.gate_up_proj, module.down_proj
    if module.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    biases = [module.gate_up_proj_bias, module.down_proj_bias] if getattr(module, "has_bias", False) else [None, None]
    if gate.is_interleaved:
        gate_up = _gate_rows_first(gate_up)
        biases[0] = None if biases[0] is None else _gate_rows_first(biases[0])
    out: Tensor = torch.ops.inferc.moe_experts.default(
        hidden, expert_ids, expert_weights, gate_up, down, *biases, gate.activation, gate.alpha, gate.limit
    )
    return out


def _gate_rows_first(weight: Tensor) -> Tensor:
    """Reorder [num_experts, 2 * size, …] from alternating gate and up rows to all gate rows, then all up rows."""
    num_experts, rows, *rest = weight.shape
    return weight.view(num_experts, rows // 2, 2, *rest).transpose(1, 2).reshape(num_experts, rows, *rest)


@dataclass(frozen=True)
class Gate:
    """The activation of gate and up in experts: the arguments of `inferc.moe_experts`, and the order of the rows."""

    activation: str
    alpha: float
    limit: float
    is_interleaved: bool


def gate_of(module: Any) -> Gate:
    """Find which gate of inferc.moe_experts a module has, by running both on a few numbers."""
    alpha = float(getattr(module, "alpha", None) or getattr(module, "swiglu_alpha", None) or 1.0)
    limit = float(getattr(module, "limit", 0.0) or 0.0)
    gate_up = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)) * 4
    with torch.no_grad(), torch.device("cpu"):
        expected = module._apply_gate(gate_up)
    for is_interleaved in (False, True):
        gate, up = (gate_up[:, ::2], gate_up[:, 1::2]) if is_interleaved else gate_up.chunk(2, -1)
        for activation in ACTIVATIONS:
            found = activated(gate, up, activation, alpha, limit)
            if torch.allclose(found, expected, rtol=1e-5, atol=1e-5):
                return Gate(activation, alpha, limit, is_interleaved)
    activation = type(getattr(module, "act_fn", None)).__name__
    raise UnsupportedError(
        f"{type(module).__name__}: experts with a gate of their own ({activation}); inferc.moe_experts has"
        f" {', '.join(ACTIVATIONS)}"
    )
