"""The capture of a model as a checked Program, with a cache of the last captures."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from pathlib import Path

import torch

from inferc.frontend.check import check_capture, check_module
from inferc.frontend.checkpoint.load import Checkpoint, load, load_module
from inferc.frontend.export import export_model
from inferc.frontend.trace.rope import warn_of_fixed_rope
from inferc.ir import program as program_lib
from inferc.ir.program import Program


def capture(
    model: str | Path | torch.nn.Module | Checkpoint,
    dtype: str = "bfloat16",
    max_model_len: int | None = None,
    *,
    check: bool = True,
) -> Program:
    """Load `model` (folder, hub id, transformers causal LM, or the result of `load`) and capture it, checked.

    dtype is that of activations and weights. max_model_len (in tokens; by default what the model was trained for) fixes
    a rope that depends on length (see trace/rope.py); `info.rope` and a warning then tell so. With `check`, a small
    random copy must give the logits of the reference, and a module those of its class and config (see check.py).

    The last captures are kept, so that compiling a model for several targets traces it once. Modules in memory are
    captured every time, since their code may have changed.
    """
    if isinstance(model, torch.nn.Module):
        checkpoint = load_module(model)
    else:
        checkpoint = model if isinstance(model, Checkpoint) else load(model)
    key = None if checkpoint.module is not None else _key(checkpoint, dtype, max_model_len)
    kept = _KEPT.get(key, check)
    program = kept or export_model(checkpoint, dtype, max_model_len)
    if check:
        warn_of_fixed_rope(program.info.rope)
        if kept is None:
            check_module(checkpoint)
            check_capture(program, checkpoint, max_model_len)
    if kept is None:
        _KEPT.put(key, check, program)
    return program


class _Kept:
    """A cache of the last captured programs, kept as text because whoever gets a program changes it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.programs: OrderedDict[str, tuple[bool, str]] = OrderedDict()

    def get(self, key: str | None, checked: bool) -> Program | None:
        was_checked, text = self.programs.get(key or "", (False, ""))
        if not text or was_checked < checked:
            return None
        self.programs.move_to_end(key or "")
        return program_lib.from_json(json.loads(text))

    def put(self, key: str | None, checked: bool, program: Program) -> None:
        if key is None:
            return
        self.programs[key] = (checked, json.dumps(program_lib.to_json(program)))
        self.programs.move_to_end(key)
        if len(self.programs) > self.most:
            self.programs.popitem(last=False)


_KEPT = _Kept(most=32)


def _key(checkpoint: Checkpoint, dtype: str, max_model_len: int | None) -> str | None:
    """Return the key under which a capture is kept: all that a program depends on.

    Values of weights and the folder's name are not part of it. The key is None, so that nothing is kept, where values
    matter too: they decide whether tensors that are both tied and stored stay tied.
    """
    if getattr(checkpoint.config, "tie_word_embeddings", False):
        tied = getattr(checkpoint.model_class, "_tied_weights_keys", None) or ()
        if any(re.search(f"{pattern}$", name) for pattern in tied for name in checkpoint.tensors):
            return None
    tensors = sorted((name, list(shape), str(kind)) for name, (shape, kind) in checkpoint.tensors.items())
    kind = checkpoint.model_class
    config = json.loads(checkpoint.config.to_json_string(use_diff=False))
    config.pop("_name_or_path", None)
    return json.dumps([kind.__module__, kind.__qualname__, dtype, max_model_len, tensors, config])
