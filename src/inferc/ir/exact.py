"""A program in exact arithmetic: everything in float32, and nothing rounded to a narrower float or to integers.

In bfloat16 or in integers, a projection that is scaled by 1.01 hides among the roundings. The exact reading of the same
graph differs from the model by float32's last digits, or it computes something else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from inferc.ir import program as program_lib
from inferc.ir import weights as weight_lib
from inferc.ir.ops.quantize import unrounded
from inferc.ir.program import Program
from inferc.ir.reference import ReadWeight, run_sequence
from inferc.ir.weights import TensorReader, Weight

NARROW = (torch.bfloat16, torch.float16)
PART_ROWS = 8192  # the rows of a product's weight that are widened at once


def exact(program: Program, windows: Mapping[int, int] = MappingProxyType({})) -> Program:
    """Return a copy of `program` that computes in float32 where the program computes in a narrower float or in int8.

    It is for `run`, whose references also leave the rounding to integers out. windows: replaces attention windows and
    chunks of these sizes by others, so that short sequences reach beyond them.
    """
    copy = program_lib.copy(program)
    for node in copy.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function":
            _widen_call(node, windows)
            node.target = BY_PARTS.get(node.target, node.target)
        elif node.op == "placeholder" and isinstance(value, Tensor) and value.dtype in NARROW:
            node.meta["val"] = copy.fake(value.shape, torch.float32)
    copy.weights = {name: exact_weight(weight) for name, weight in copy.weights.items()}
    narrow = (*NARROW, torch.int8)
    copy.kv_groups = tuple(
        replace(group, dtype=torch.float32) if group.dtype in narrow else group for group in copy.kv_groups
    )
    return copy


def _widen_call(node: fx.Node, windows: Mapping[int, int]) -> None:
    def widened(argument: Any) -> Any:
        return torch.float32 if argument in NARROW else argument

    node.args = tuple(widened(each) for each in node.args)
    node.kwargs = {name: widened(each) for name, each in node.kwargs.items()}
    if windows and isinstance(node.target, torch._ops.OpOverload):
        names = [each.name for each in node.target._schema.arguments]
        at = names.index("window") if "window" in names else len(node.args)
        window = node.args[at] if at < len(node.args) else None
        if isinstance(window, int):
            node.args = (*node.args[:at], windows.get(window, window), *node.args[at + 1 :])


def exact_weight(weight: Weight) -> Weight:
    """Return the expression with float32 in place of narrower floats, for all that is computed from stored tensors.

    A cast of a stored tensor stays: it is how the model itself has the weight in its dtype.
    """
    if not weight.args or weight.op == "mxfp4":
        return weight
    if weight.op == "cast" and _is_stored(weight.args[0]):
        return weight
    dtype = torch.float32 if weight.dtype in NARROW and weight.op in ("cast", "pointwise") else weight.dtype
    return replace(weight, args=tuple(map(exact_weight, weight.args)), dtype=dtype)


def _is_stored(weight: Weight) -> bool:
    """Tell whether the expression only takes and arranges stored numbers."""
    return weight.op not in ("pointwise", "cast") and all(map(_is_stored, weight.args))


def _embed(weight: Tensor, token_ids: Tensor, *_of_gradients: Any) -> Tensor:
    """Look rows of an embedding up, and widen only these."""
    return torch.ops.aten.embedding.default(weight, token_ids).float()  # type: ignore[no-any-return]


def _project(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a product from some rows of the weight at a time, which are widened for that."""
    parts = [torch.nn.functional.linear(x.float(), rows.float()) for rows in weight.split(PART_ROWS)]
    product = torch.cat(parts, -1)
    return product if bias is None else product + bias.float()


# The ops that take the largest weights of a model. They widen what they read of them, which spares copies of the whole
# weights in float32.
BY_PARTS = {
    torch.ops.aten.embedding.default: _embed,
    torch.ops.aten.linear.default: _project,
    torch.ops.inferc.lm_head.default: _project,
}


def _widened_by_users(program: Program) -> set[str]:
    """Return the names of the weights that only such ops read as widen them themselves."""
    readers = [node for node in program.graph.nodes if node.op == "get_attr"]
    others = {str(node.target) for node in readers if {use.target for use in node.users} - set(BY_PARTS.values())}
    return {str(node.target) for node in readers} - others


def read_exactly(program: Program, reader: TensorReader) -> ReadWeight:
    """Return a function that reads a weight of an exact program by its name, in float32 where it is a float.

    A weight that is widened by the ops that read it is as it is stored.
    """
    as_stored = _widened_by_users(program)

    def read(name: str) -> Tensor:
        with unrounded():
            value = weight_lib.read_whole(program.weights[name], reader)
        return value.float() if value.is_floating_point() and name not in as_stored else value

    return read


def run_exactly(
    program: Program, token_ids: Sequence[int], reader: TensorReader, sizes: Sequence[int] | None = None
) -> Tensor:
    """Compute the logits [T, vocab_size] of one sequence by a program that `exact` made, as `run_sequence` does."""
    with unrounded():
        return run_sequence(program, token_ids, read_exactly(program, reader), sizes)
