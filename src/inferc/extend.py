"""The public names for writing a pass, an op or a kernel outside of inferc: `from inferc.extend import Rewrite`.

docs/extending.md teaches them, examples/own_pass.py uses them. Their place here is stable; the modules that they come
from are internal and may move. Imports torch, and nothing that reads a checkpoint.
"""

from inferc.codegen.cpp.calls.builder import Builder, cpp_float
from inferc.codegen.cpp.values import Call, cpp_type, row_count
from inferc.codegen.kernel import OTHER_CASE, OTHER_TARGET, Kernel
from inferc.codegen.values import Operand, Values
from inferc.ir.ops.registry import define, like_first
from inferc.ir.program import Program, name_of, named_arguments
from inferc.ir.weights import Weight
from inferc.passes.rewrite import Rewrite, infer_types, no_rewrite
from inferc.targets import Target

__all__ = [
    "OTHER_CASE",
    "OTHER_TARGET",
    "Builder",
    "Call",
    "Kernel",
    "Operand",
    "Program",
    "Rewrite",
    "Target",
    "Values",
    "Weight",
    "cpp_float",
    "cpp_type",
    "define",
    "infer_types",
    "like_first",
    "name_of",
    "named_arguments",
    "no_rewrite",
    "row_count",
]
