"""The capture of a model as a checked Program."""

from __future__ import annotations

from pathlib import Path

import torch

from inferc.frontend.capture_cache import CaptureCache, capture_key
from inferc.frontend.check import check_attention_count, check_capture, check_module
from inferc.frontend.checkpoint.load import Checkpoint, load, load_module
from inferc.frontend.export import export_model
from inferc.frontend.trace.rope import warn_of_fixed_rope
from inferc.ir.program import Program

KEPT = CaptureCache()


def capture(
    model: str | Path | torch.nn.Module | Checkpoint,
    dtype: str = "bfloat16",
    max_model_len: int | None = None,
    *,
    check: bool = True,
    is_compared: bool = False,
) -> Program:
    """Load `model` (folder, hub id, transformers causal LM, or the result of `load`) and capture it, checked.

    dtype is that of activations and weights. max_model_len (in tokens; by default what the model was trained for) fixes
    a rope that depends on length (see trace/rope.py); `info.rope` and a warning then tell so. With `check`, a small
    random copy must give the logits of the reference, and a module those of its class and config (see check.py).
    is_compared: the caller compares the program with the model itself, so that no copy has to be captured for it.

    Captures are kept (see capture_cache.py), so that compiling a model again, for another target or scheme, traces
    nothing. Modules in memory are captured every time, since their code may have changed.
    """
    if isinstance(model, torch.nn.Module):
        checkpoint = load_module(model)
    else:
        checkpoint = model if isinstance(model, Checkpoint) else load(model)
    key = capture_key(checkpoint, dtype, max_model_len)
    by_copy = check and not is_compared
    kept = KEPT.get(key, by_copy)
    program = kept or export_model(checkpoint, dtype, max_model_len)
    if check:
        warn_of_fixed_rope(program.info.rope)
        if kept is None:
            check_module(checkpoint)
            check_attention_count(program, checkpoint.name)
    if by_copy and kept is None:
        check_capture(program, checkpoint, max_model_len)
    if kept is None:
        KEPT.put(key, by_copy, program)
    return program
