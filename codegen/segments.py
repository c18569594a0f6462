"""The segments of a paged program: runs of nodes that an engine computes, between the nodes of inferc's own kernels.

`partition_segments` numbers them in `meta["segment"]`. Views and slices have no number: every reader of a view makes it
again from its source.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from inferc.ir.program import Program, dtype_name, target_name
from inferc.manifest_types import RowKind

VIEWS = (torch.ops.aten.view.default, torch.ops.aten.slice.Tensor)
# The inputs of the step, and the kind of their rows.
ROWS: dict[str, RowKind] = {"token_ids": "tokens", "logits_rows": "rows"}


@dataclass(frozen=True)
class Segment:
    """Nodes that run as one call of an engine.

    inputs: what the segment reads of other nodes, by the engine's name for it: values, inputs of the step, and one node
    for each weight. outputs: those of its own values that others read. engine: the engine's name, the same for equal
    segments of different layers. rows: the kind of the rows of its results, "tokens" or "rows".
    """

    number: int
    nodes: tuple[fx.Node, ...]
    inputs: dict[str, fx.Node]
    outputs: dict[str, fx.Node]
    engine: str
    rows: RowKind

    @property
    def layer(self) -> int | None:
        """The layer of the segment's first node that has one."""
        return next((node.meta["layer"] for node in self.nodes if node.meta.get("layer") is not None), None)


def segment_of(node: fx.Node) -> int | None:
    number: int | None = node.meta.get("segment")
    return number


def source_of(node: fx.Node) -> fx.Node:
    """Return the value that a view is of; any other node is its own source."""
    while node.op == "call_function" and node.target in VIEWS:
        node = node.args[0]  # type: ignore[assignment]
    return node


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that read a value, directly or through views of it."""
    for user in node.users:
        if user.op == "call_function" and user.target in VIEWS:
            yield from readers(user)
        else:
            yield user


def stays_inside(node: fx.Node) -> bool:
    """Tell whether only a value's own segment reads it, so that it needs no place in memory."""
    return segment_of(node) is not None and all(segment_of(each) == segment_of(node) for each in readers(node))


def row_kinds(program: Program) -> dict[str, RowKind]:
    """Return the kind of rows of values, "tokens" or "rows", by the symbol of their axis 0."""
    return {str(node.meta["val"].shape[0]): ROWS[node.name] for node in program.inputs() if node.name in ROWS}


def segments_of(program: Program) -> tuple[Segment, ...]:
    """Return the segments in the order in which they run; none for a program that was not partitioned."""
    nodes: dict[int, list[fx.Node]] = {}
    for node in program.graph.nodes:
        number = segment_of(node)
        if number is not None:
            nodes.setdefault(number, []).append(node)
    kinds, engines = row_kinds(program), dict[str, str]()
    made = []
    for number, own in nodes.items():
        inputs = _inputs(own)
        given = [node for node in own if not stays_inside(node)]
        outputs = {f"y{index}": node for index, node in enumerate(given)}
        signature = _signature(own, inputs, outputs, kinds)
        engine = engines.setdefault(signature, f"segment-{len(engines)}")
        made.append(Segment(number, tuple(own), inputs, outputs, engine, kinds[str(given[0].meta["val"].shape[0])]))
    return tuple(made)


def _inputs(nodes: list[fx.Node]) -> dict[str, fx.Node]:
    """Return the inputs of a segment's nodes, in the order in which they are first read."""
    own, found, names = set(nodes), dict[str, fx.Node](), dict[Any, str]()
    for node in nodes:
        for read in map(source_of, node.all_input_nodes):
            key = str(read.target) if read.op == "get_attr" else read
            if read in own or key in names:
                continue
            if read.op == "placeholder":
                names[key] = read.name
            else:
                kind = "w" if read.op == "get_attr" else "x"
                names[key] = f"{kind}{sum(name[0] == kind and name[1:].isdigit() for name in names.values())}"
            found[names[key]] = read
    return found


def _signature(
    nodes: list[fx.Node], inputs: dict[str, fx.Node], outputs: dict[str, fx.Node], kinds: Mapping[str, str]
) -> str:
    """Return a digest that is equal for segments that one engine can compute.

    It covers everything but which weights and values the segment is given.
    """
    names: dict[Any, str] = {str(each.target) if each.op == "get_attr" else each: name for name, each in inputs.items()}
    lines: list[Any] = [[name, _type(each, kinds)] for name, each in inputs.items()]

    def argument(value: Any) -> Any:
        if isinstance(value, fx.Node):
            key = str(value.target) if value.op == "get_attr" else value
            return names[key] if key in names else call(value)
        if isinstance(value, (list, tuple)):
            return [argument(each) for each in value]
        return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)

    def call(node: fx.Node) -> list[Any]:
        kwargs = {name: argument(value) for name, value in node.kwargs.items()}
        return [target_name(node.target), [argument(each) for each in node.args], kwargs, _type(node, kinds)]

    for index, node in enumerate(nodes):
        lines.append(call(node))
        names[node] = f"%{index}"
    lines.append([names[node] for node in outputs.values()])
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()


def _type(node: fx.Node, kinds: Mapping[str, str]) -> list[Any]:
    value = node.meta["val"]
    if isinstance(value, tuple):  # it stays inside the segment: others read its parts
        return []
    sizes = [size if isinstance(size, int) else kinds.get(str(size), str(size)) for size in value.shape]
    return [dtype_name(value.dtype), sizes]
