"""transformers' own model: what a compiled one is compared with, in certificates and tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from inferc.frontend.checkpoint.load import Checkpoint
from inferc.frontend.export import DTYPES, sequence_length
from inferc.frontend.names import Names
from inferc.frontend.trace import torch_export as trace
from inferc.frontend.trace.rope import fix_rope


def reference_model(checkpoint: Checkpoint, dtype: str, max_model_len: int | None = None) -> Any:
    """The transformers model of a checkpoint on the CPU, in `dtype`, with the attention transformers would choose.

    A rope that depends on length is fixed as in `export_model`: it is what the compiled model promises.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.quantization_config import Mxfp4Config

    if checkpoint.folder is not None:
        packed = any(name.endswith("_blocks") for name in checkpoint.tensors)
        options = {"quantization_config": Mxfp4Config(dequantize=True)} if packed else {}
        with trace.quiet():
            config = AutoConfig.from_pretrained(checkpoint.folder, local_files_only=True)
            config._attn_implementation = _attention(
                checkpoint
            )  # given as an option, what config.json names goes before it
            model: Any = AutoModelForCausalLM.from_pretrained(
                checkpoint.folder, config=config, dtype=DTYPES[dtype], local_files_only=True, **options
            )
        model.eval().requires_grad_(False)
    else:
        model = _copy_module(checkpoint, DTYPES[dtype])
    fix_rope(model, sequence_length(checkpoint.config, max_model_len))
    return model


def _attention(checkpoint: Checkpoint) -> str | None:
    """The one to ask for; None lets transformers choose. The sdpa that its 5.17 chooses drops a softcap without a word, and a config
    may name one that needs a GPU."""
    named = getattr(checkpoint.config, "_attn_implementation", None)
    has_softcap = getattr(checkpoint.config, "attn_logit_softcapping", None)
    return "eager" if has_softcap or named not in (None, "eager", "sdpa") else named


def _copy_module(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """The checkpoint's module with its parameters in `dtype`; buffers (rope frequencies) keep theirs."""
    assert checkpoint.module is not None
    model = trace.build(checkpoint.model_class, checkpoint.config, dtype, "cpu", attention=_attention(checkpoint))
    model.load_state_dict(checkpoint.module.state_dict())
    own = dict(model.named_buffers())
    for name, buffer in checkpoint.module.named_buffers():
        own[name].copy_(buffer)
    return model


def reference_logits(model: Any, token_ids: Sequence[int]) -> Tensor:
    """Logits of every position of one sequence: float32 [len(token_ids), vocab_size]."""
    with trace.quiet(), torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits
    return logits[0].float()


def reference_greedy(model: Any, token_ids: Sequence[int], num_tokens: int) -> list[int]:
    """The `num_tokens` tokens that greedily follow `token_ids`; an eos token does not end them."""
    ids, cache, found = torch.tensor([list(token_ids)]), None, []
    with trace.quiet(), torch.no_grad():
        for _ in range(num_tokens):
            out = model(input_ids=ids, past_key_values=cache, use_cache=True)
            ids, cache = out.logits[:, -1:].float().argmax(-1), out.past_key_values
            found.append(int(ids))
    return found


def reference_states(model: Any, token_ids: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """Of one sequence, float32: logits [len(token_ids), vocab_size], and what each layer hands to the next [len(token_ids), hidden_size]."""
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
