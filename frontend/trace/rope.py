"""The fixing of rope whose frequencies depend on the sequence's length, for one length at compile time.

transformers recomputes these frequencies while it runs, from the longest position so far. Cached K was rotated with the
frequencies of its time, so a server would mix them; a compiled model has one set, that of a sequence of
`max_model_len` tokens. So dynamic NTK equals transformers' forward pass over `max_model_len` tokens, and over no other
length beyond the trained one; longrope has its long factors, or, with a `max_model_len` within the original context,
its short ones.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import Tensor

from inferc.errors import UnsupportedError
from inferc.frontend.trace.buffers import initial_buffers
from inferc.ir.model_info import FixedRope

log = logging.getLogger(__name__)

Overrides = dict[str, Tensor]  # buffer name -> its fixed value, on the CPU


def fix_rope(model: Any, max_model_len: int) -> tuple[Overrides, list[FixedRope]]:
    """Fix every length-dependent rope of `model`, in place, for sequences of up to `max_model_len` tokens.

    Returns the values of its frequency buffers and a record of each: module, kind, length, and up to which length
    transformers would use other frequencies (0: up to none).
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
            unscaled = _unscaled_length(module.config, str(kind), layer_type)
            initial = _initial(model, path, buffer) if "dynamic" in str(kind) else None
            if initial is not None and max_model_len <= unscaled:
                value = initial  # transformers leaves them so up to that length, whatever a class reads from its config
            elif initial is not None:
                _refuse_own_kind(module, str(kind), layer_type, unscaled, initial, path)
            overrides[f"{path}.{buffer}" if path else buffer] = value
            if "long_mscale" in (getattr(module.config, "rope_parameters", None) or {}):
                _fix_scale(module, max_model_len)
            if not getattr(module, buffer).is_meta:
                getattr(module, buffer).copy_(value)
            differs = unscaled if max_model_len > unscaled else 0
            records.append(FixedRope(path, str(kind), max_model_len, differs))
            by_layer[layer_type] = "default"  # the forward pass then leaves the buffer alone
        module.rope_type = by_layer if isinstance(kinds, dict) else by_layer[None]
    return overrides, records


def warn_of_fixed_rope(records: list[FixedRope]) -> None:
    """Warn which sequences get other frequencies than transformers would give them; records are those of `fix_rope`."""
    for record in records:
        if record.differs_up_to:
            what = "longrope's long factors" if record.kind == "longrope" else f"{record.kind} rope's scaling"
            log.warning(
                "%s: %s for %d tokens is used for all lengths, where transformers' depends on the length;"
                " for sequences up to %d tokens compile with --max-model-len %d",
                record.module,
                what,
                record.max_model_len,
                record.differs_up_to,
                record.differs_up_to,
            )


def longest_context(config: Any, trained: int) -> int:
    """Return how many positions a model made for `trained` positions reaches by the rope scaling of its config.

    For yarn and dynamic NTK a config says factor times the original length, whatever max_position_embeddings is. For
    linear, llama3 and longrope max_position_embeddings is by convention the scaled length (Llama 3.2: 131072, with
    factor 32 over 8192), unless it is the original one.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return max([trained, *(_scaled_length(each, trained) for each in nested or [parameters])])


def _scaled_length(parameters: dict[str, Any], trained: int) -> int:
    kind, factor = parameters.get("rope_type"), parameters.get("factor")
    original = parameters.get("original_max_position_embeddings")
    if not isinstance(factor, (int, float)):
        return trained
    if kind == "dynamic":
        return int(factor * trained)
    if kind == "yarn":
        return int(factor * (original or trained))
    if kind in ("linear", "llama3", "longrope") and original and trained <= original:
        return int(factor * original)
    return trained


def _unscaled_length(config: Any, kind: str, layer_type: str | None) -> int:
    """Return up to which length transformers leaves the frequencies of a length-dependent rope unscaled."""
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    name = "original_max_position_embeddings"
    return int(parameters[name] if kind == "longrope" else config.max_position_embeddings)


def _initial(model: Any, path: str, buffer: str) -> Tensor | None:
    """Return the frequencies that a module has before any text, or None if its class computes none."""
    found = getattr(model.get_submodule(path), buffer)
    if found.is_meta:
        found = initial_buffers(model, path).get(buffer)
    return None if found is None else found.detach().to("cpu", torch.float32, copy=True)


def _refuse_own_kind(module: Any, kind: str, layer_type: str | None, unscaled: int, initial: Tensor, path: str) -> None:
    """Raise UnsupportedError for a class with dynamic frequencies of its own.

    Beyond `unscaled` tokens they would be lost.
    """
    if not torch.allclose(initial, _frequencies(module, kind, layer_type, unscaled, path), rtol=1e-5):
        raise UnsupportedError(
            f"{path}: {type(module).__name__} has a {kind} rope of its own, which this transformers leaves beyond"
            f" {unscaled} tokens; compile with --max-model-len {unscaled}"
        )


def _fix_scale(module: Any, max_model_len: int) -> None:
    """Fix the values that the rope of Phi-3.5-MoE computes again in every forward pass.

    These are frequencies that do not depend on the length, and one of two scales, which does.
    """
    parameters = module.config.rope_parameters
    is_long = max_model_len > parameters["original_max_position_embeddings"]
    scale = parameters["long_mscale" if is_long else "short_mscale"]
    with torch.device("cpu"):
        inv_freq, _ = module.rope_init_fn(module.config)
    module.config = copy.deepcopy(module.config)
    module.config.rope_parameters = {**parameters, "rope_type": "default"}
    module.rope_init_fn = lambda _config: (inv_freq, scale)


def _depends_on_length(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def _frequencies(module: Any, kind: str, layer_type: str | None, max_model_len: int, path: str) -> Tensor:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind not in ROPE_INIT_FUNCTIONS:
        raise UnsupportedError(
            f"{path}: rope of kind {kind} depends on length in a way not known here; expected dynamic"
        )
    keywords = {} if layer_type is None else {"layer_type": layer_type}
    value: Tensor = ROPE_INIT_FUNCTIONS[kind](module.config, torch.device("cpu"), seq_len=max_model_len, **keywords)[0]
    return value.to(torch.float32)
