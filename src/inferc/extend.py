"""The public names for writing a pass, an op or a kernel outside of inferc: `from inferc.extend import Rewrite`.

docs/extending.md teaches them, examples/own_pass.py and examples/line.py use them. Their place here is stable; the
modules that they come from are internal and may move. Imports torch; what reads a checkpoint is imported at its first
use.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from inferc.codegen.cpp.calls.builder import Builder, cpp_float
from inferc.codegen.cpp.values import Call, cpp_type, row_count
from inferc.codegen.kernel import OTHER_CASE, OTHER_TARGET, Kernel
from inferc.codegen.values import Operand, Values
from inferc.ir.ops.registry import define, like_first
from inferc.ir.program import Program, from_json, name_of, named_arguments, to_json
from inferc.ir.weights import Weight, read_whole
from inferc.passes.normalize.canonicalise import Canonicalise
from inferc.passes.rewrite import Rewrite, infer_types, no_rewrite
from inferc.targets import Target

if TYPE_CHECKING:
    from inferc.frontend.checkpoint.load import Checkpoint

__all__ = [
    "OTHER_CASE",
    "OTHER_TARGET",
    "Builder",
    "Call",
    "Canonicalise",
    "Kernel",
    "Operand",
    "Program",
    "Rewrite",
    "Target",
    "Values",
    "Weight",
    "capture",
    "cpp_float",
    "cpp_type",
    "define",
    "from_json",
    "infer_types",
    "like_first",
    "load_checkpoint",
    "name_of",
    "named_arguments",
    "no_rewrite",
    "read_whole",
    "row_count",
    "to_json",
]


def load_checkpoint(model: str | Path) -> Checkpoint:
    """Return the checkpoint of a Hugging Face folder or hub id: its config, and a `reader` of its tensors.

    Raises ConfigError, ExportError or UnsupportedError for a model that cannot be compiled.
    """
    from inferc.frontend.checkpoint.load import load

    return load(model)


def capture(checkpoint: Checkpoint, dtype: str = "bfloat16", max_model_len: int | None = None) -> Program:
    """Trace a checkpoint's model, and return it as a Program whose weights are not read yet.

    dtype: that of activations and weights. max_model_len: in tokens; by default what the model was trained for.
    """
    from inferc.frontend import capture as frontend

    return frontend.capture(checkpoint, dtype, max_model_len)
