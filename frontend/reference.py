"""The reference model: transformers' own, which certificates and tests compare a compiled model with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from inferc.frontend.checkpoint.load import Checkpoint
from inferc.frontend.export import DTYPES, sequence_length
from inferc.frontend.names import Names
from inferc.frontend.trace import torch_export as trace
from inferc.frontend.trace.rope import fix_rope


def reference_model(
    checkpoint: Checkpoint,
    dtype: str,
    max_model_len: int | None = None,
    shorten: Callable[[Any], Any] | None = None,
) -> Any:
    """Return the transformers model of a checkpoint on the CPU, in `dtype`, with the attention of transformers' choice.

    A rope that depends on length is fixed as in `export_model`, since that is what the compiled model promises.
    shorten: maps the config to that of a model with fewer layers, of which nothing more is read.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.quantization_config import Mxfp4Config

    if checkpoint.folder is not None:
        packed = any(name.endswith("_blocks") for name in checkpoint.tensors)
        options = {"quantization_config": Mxfp4Config(dequantize=True)} if packed else {}
        with trace.quiet():
            config = AutoConfig.from_pretrained(checkpoint.folder, local_files_only=True)
            # It is set here, because the attention that config.json names would override an option.
            config._attn_implementation = _attention(checkpoint)
            config = shorten(config) if shorten else config
            model: Any = AutoModelForCausalLM.from_pretrained(
                checkpoint.folder, config=config, dtype=DTYPES[dtype], local_files_only=True, **options
            )
        model.eval().requires_grad_(False)
    else:
        model = _copy_module(checkpoint, DTYPES[dtype], shorten)
    fix_rope(model, sequence_length(checkpoint.config, max_model_len))
    return model


def _attention(checkpoint: Checkpoint) -> str | None:
    """Return the attention implementation to ask for; None lets transformers choose.

    The sdpa that transformers 5.17 chooses silently drops a softcap, and a config may name an implementation that needs
    a GPU; eager is asked for in both cases.
    """
    named = getattr(checkpoint.config, "_attn_implementation", None)
    has_softcap = getattr(checkpoint.config, "attn_logit_softcapping", None)
    return "eager" if has_softcap or named not in (None, "eager", "sdpa") else named


def _copy_module(checkpoint: Checkpoint, dtype: torch.dtype, shorten: Callable[[Any], Any] | None) -> Any:
    """Copy the checkpoint's module with its parameters in `dtype`; buffers (rope frequencies) keep their dtype."""
    assert checkpoint.module is not None
    config = shorten(checkpoint.config) if shorten else checkpoint.config
    model = trace.build(checkpoint.model_class, config, dtype, "cpu", attention=_attention(checkpoint))
    model.load_state_dict(checkpoint.module.state_dict(), strict=shorten is None)
    own = dict(model.named_buffers())
    for name, buffer in checkpoint.module.named_buffers():
        if name in own:
            own[name].copy_(buffer)
    return model


def reference_logits(model: Any, token_ids: Sequence[int]) -> Tensor:
    """Return the logits of every position of one sequence: float32 [len(token_ids), vocab_size]."""
    with trace.quiet(), torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits
    return logits[0].float()


def reference_greedy(model: Any, token_ids: Sequence[int], num_tokens: int) -> list[int]:
    """Return the `num_tokens` tokens that greedily follow `token_ids`; an eos token does not end them."""
    ids, cache, found = torch.tensor([list(token_ids)]), None, []
    with trace.quiet(), torch.no_grad():
        for _ in range(num_tokens):
            out = model(input_ids=ids, past_key_values=cache, use_cache=True)
            ids, cache = out.logits[:, -1:].float().argmax(-1), out.past_key_values
            found.append(int(ids))
    return found


def reference_states(model: Any, token_ids: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """Return the float32 logits of one sequence, and the hidden states that each layer outputs.

    The logits are [len(token_ids), vocab_size], and each layer's states [len(token_ids), hidden_size].
    """
    states: list[Tensor] = []

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        states.append(hidden.reshape(len(token_ids), -1).float())

    handles = [layer.register_forward_hook(keep) for layer in model.get_submodule(Names(model).layers)]
    try:
        return reference_logits(model, token_ids), states
    finally:
        for handle in handles:
            handle.remove()
