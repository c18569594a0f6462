"""The values of a step that a runner can show, by the names of their nodes in program.json."""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from inferc.errors import ConfigError
from inferc.manifest_types import Program, TensorType
from inferc.runtime.artifact.numpy_dtypes import NUMPY_DTYPES

DTYPES = ("bfloat16", "float32", "int32", "int64", "int8")  # of the values that can be shown
ANY = "*?["
SHOWN = 5  # how many similar names an error message suggests


@dataclass(frozen=True)
class Node:
    """A value of the step that can be tapped.

    shape: of one row; by_logits_row: it has a row only for each sampled row, not for each token.
    """

    name: str
    number: int  # its id in program.json's "observable"
    layer: int | None
    dtype: str
    shape: tuple[int, ...]
    by_logits_row: bool

    @cached_property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * NUMPY_DTYPES[self.dtype].itemsize


def all_nodes(program: Program) -> dict[str, Node]:
    """Return the nodes of a program.json that have a row per token or per sampled row, by name, in execution order."""
    inputs = {entry.name: entry.shape for entry in program.step.inputs}
    by_row = {"token_ids": False, "logits_rows": True}
    domains = {inputs[name][0]: of for name, of in by_row.items() if name in inputs}
    numbers = {entry.name: entry.id for entry in program.observable}
    found = {}
    for number, node in enumerate(program.program.nodes):
        name, value = str(node.name), node.val
        if node.op != "call_function" or not isinstance(value, TensorType) or (numbers and name not in numbers):
            continue
        sizes = value.shape[1:]
        is_known = value.shape and value.shape[0] in domains and all(str(size).isdigit() for size in sizes)
        if value.dtype in DTYPES and is_known:
            shape = tuple(map(int, sizes))
            domain = domains[value.shape[0]]
            found[name] = Node(name, numbers.get(name, number), node.layer, value.dtype, shape, domain)
    return found


def choose_nodes(program: Program, wanted: Sequence[str]) -> tuple[Node, ...]:
    """Return the nodes that match these names, where `*` matches any text.

    Raises ConfigError for a name without a match.
    """
    known = all_nodes(program)
    found: dict[str, Node] = {}
    for each in wanted:
        names = fnmatch.filter(known, each) if any(char in each for char in ANY) else [each] if each in known else []
        if not names:
            near = difflib.get_close_matches(each, known, SHOWN, 0.5) or list(known)[:SHOWN]
            raise ConfigError(
                f"--tap {each}: the artifact's step has no such value; near: {', '.join(near)}"
                ' (program.json, "observable", has all)'
            )
        found.update((name, known[name]) for name in names)
    return tuple(found[name] for name in known if name in found)
