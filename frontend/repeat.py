"""The tracing of equal layers once: which layers a trace needs, and where the other layers belong in it.

The layers of most models repeat, in blocks of one layer or of a few. The trace has the layers in front of the blocks,
the first block and the last; the converter then writes the first block once for each block but the last. Whether this
is right is read off the trace: the last block must do to its own weights what the first does to its own, op for op, and
it must read from the block before it what the blocks after the first would read. The layers in between are equal in
everything that `kinds` sees.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx

from inferc.frontend.names import Names
from inferc.frontend.trace import torch_export as trace
from inferc.ir.program import ancestors

log = logging.getLogger(__name__)

COUNTERS = {"layer_idx", "layer_id", "layer_index", "layer_number"}  # attributes that only number the layer
PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Blocks:
    """A repetition of `times` blocks of `size` layers from layer `first` to the last, each like the one before it."""

    first: int
    size: int
    times: int

    @property
    def count(self) -> int:
        return self.first + self.size * self.times

    @property
    def traced(self) -> list[int]:
        """The layers that a trace needs."""
        return [*range(self.first + self.size), *range(self.count - self.size, self.count)]

    def is_first(self, layer: int | None) -> bool:
        return layer is not None and self.first <= layer < self.first + self.size

    def is_last(self, layer: int | None) -> bool:
        return layer is not None and layer >= self.count - self.size


@dataclass(frozen=True)
class Section:
    """A run of consecutive trace nodes that is written `times` times, each time for layers `step` further on.

    From the second time on, a node that is a key of `carried` is replaced by its value, as that was written the time
    before.
    """

    nodes: list[fx.Node]
    times: int = 1
    step: int = 0
    carried: dict[fx.Node, fx.Node] = field(default_factory=dict)


def kinds(layers: Any, config: Any) -> list[Hashable]:
    """Return for each layer of a model a value that is equal for equal layers.

    It covers modules, shapes, attributes, and the config's lists by layer.
    """
    count = len(layers)
    lists = [value for value in vars(config).values() if isinstance(value, (list, tuple)) and len(value) == count]
    return [(_kind(layer), tuple(str(value[index]) for value in lists)) for index, layer in enumerate(layers)]


def _kind(layer: Any) -> Hashable:
    parts = []
    for path, module in layer.named_modules():
        attributes = sorted((name, _said(value)) for name, value in vars(module).items() if name not in COUNTERS)
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        shapes = tuple((name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors)
        parts.append((path, type(module).__name__, tuple(attributes), shapes))
    return tuple(parts)


def _said(value: Any) -> str:
    """Return a module's attribute as a text that is equal only for equal attributes; an unknown one equals only itself.

    Modules and tensors are compared elsewhere: by the modules' own attributes, by names and shapes.
    """
    if isinstance(value, (*PLAIN, Enum, torch.dtype, torch.device)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(_said, value))})"
    if isinstance(value, (set, frozenset)):
        return f"set({', '.join(sorted(map(_said, value)))})"
    if isinstance(value, dict):
        return f"dict({', '.join(f'{_said(key)}: {_said(each)}' for key, each in value.items())})"
    if isinstance(value, (torch.nn.Module, Tensor)):
        return type(value).__qualname__
    if isinstance(value, partial):
        return f"partial({', '.join(map(_said, (value.func, value.args, value.keywords)))})"
    if isinstance(value, MethodType):
        return f"{_said(value.__func__)} of {type(value.__self__).__qualname__}"
    return f"{type(value).__qualname__} at {id(value)}"


def find_blocks(kinds: Sequence[Hashable]) -> Blocks | None:
    """Return how layers of these kinds repeat to the end, or None if a trace would need more than 3/4 of them.

    Layer 0 is in no block, since it may compute what a model computes once and reads in every layer.
    """
    count = len(kinds)
    for size in range(1, count // 2):
        first = tail(kinds, size)
        first = max(first, 1)
        first += (count - first) % size
        blocks = Blocks(first, size, (count - first) // size)
        if 4 * len(blocks.traced) <= 3 * count:
            return blocks
    return None


def tail(kinds: Sequence[Hashable], period: int) -> int:
    """Return the start of the longest tail in which every layer has the kind of the one `period` layers before it."""
    start = len(kinds) - period
    while start > 0 and kinds[start - 1] == kinds[start - 1 + period]:
        start -= 1
    return start


def trace_once(model: Any) -> tuple[Any, list[Section]]:
    """Trace `model` with as few layers as possible; return the ExportedProgram, and its nodes in the model's order."""
    names = Names(model)
    layers = dict(model.named_modules()).get(names.layers)
    blocks = None if layers is None else find_blocks(kinds(layers, model.config))
    if blocks is not None:
        found = _trace_blocks(model, names, blocks)
        if found is not None:
            return found
    exported = trace.trace(model)
    return exported, [Section(_ordered(_layers_of(exported, names)))]


def _layers_of(exported: Any, names: Names) -> dict[fx.Node, tuple[str, int | None]]:
    """Return the module path and the layer of the inputs and of all nodes that the outputs need, in the trace's order.

    The trace's checks, and the sizes that are computed for them in the first layer of a kind, are left out.
    """
    nodes = list(exported.graph.nodes)
    needed = ancestors(node for node in nodes if node.op in ("placeholder", "output"))
    stored = trace.stored(exported)
    paths = {node: stored.get(node.name) or trace.module_path(node) for node in nodes if node in needed}
    return {node: (path, names.stable(path)[1]) for node, path in paths.items()}


def _ordered(where: dict[fx.Node, tuple[str, int | None]]) -> list[fx.Node]:
    """Return the nodes of `where`; those in front of the layers come in the order in which the layers need them.

    Models compute a rope for each member of a set of layer types, and the order of a set changes from process to
    process.
    """
    nodes = list(where)
    calls = [node for node in nodes if node.op == "call_function"]
    start = next((index for index, node in enumerate(calls) if where[node][1] is not None), 0)
    front: dict[fx.Node, None] = dict.fromkeys(calls[:start])
    ordered: dict[fx.Node, None] = {}

    def need(node: fx.Node) -> None:
        if node in front and node not in ordered:
            for source in node.all_input_nodes:
                need(source)
            ordered[node] = None

    for node in nodes:
        if node not in front:
            for source in node.all_input_nodes:
                need(source)
    inputs = [node for node in nodes if node.op == "placeholder"]
    return [*inputs, *ordered, *calls[start:], *(node for node in nodes if node.op == "output")]


def _trace_blocks(model: Any, names: Names, blocks: Blocks) -> tuple[Any, list[Section]] | None:
    with _only(model.get_submodule(names.layers), blocks.traced):
        try:
            exported = trace.trace(model)
            return exported, sections(exported, names, blocks)
        except _UnequalError as error:
            log.info("%s: its layers are not as equal as they look (%s); tracing all", type(model).__name__, error)
        except Exception as error:  # noqa: BLE001  tracing the whole model will report the reason
            log.debug("%s: layers %s cannot be traced alone: %s", type(model).__name__, blocks.traced, error)
    return None


class _UnequalError(Exception):
    """The error that the first and the last block of a trace are not equal."""


@contextmanager
def _only(layers: torch.nn.Module, kept: list[int]) -> Iterator[None]:
    """Reduce the list of layers within the context to those `kept`, which keep their names."""
    every = layers._modules
    layers._modules = {str(index): every[str(index)] for index in kept}
    try:
        yield
    finally:
        layers._modules = every


def sections(exported: Any, names: Names, blocks: Blocks) -> list[Section]:
    """Return the trace of `blocks.traced` as the sections of the whole model.

    Raises _UnequalError if the first and the last block differ.
    """
    where = _layers_of(exported, names)
    nodes = _ordered(where)
    paths, layer = (
        {node: path for node, (path, _) in where.items()},
        {node: index for node, (_, index) in where.items()},
    )
    first = [node for node in nodes if blocks.is_first(layer[node])]
    last = [node for node in nodes if blocks.is_last(layer[node])]
    shift = blocks.size * (blocks.times - 1)
    for one, other in itertools.zip_longest(first, last):
        if one is None or other is None or names.moved(paths[one], shift) != paths[other]:
            raise _UnequalError(f"{one} and {other} are of other modules")
    both = {*first, *last}
    calls = [index for index, node in enumerate(nodes) if node.op == "call_function" and node in both]
    between = [node for node in nodes[calls[0] : calls[-1]] if node not in both]
    later = [user for node in first for user in node.users if user in layer and user not in both]
    if between or later:
        raise _UnequalError(f"{[*between, *later][0]} is computed between or of several of them")
    carried = _carried(first, last)
    out = []
    for is_first, group in itertools.groupby(nodes, key=lambda node: blocks.is_first(layer[node])):
        run = list(group)
        out.append(Section(run, blocks.times - 1, blocks.size, carried) if is_first else Section(run))
    return out


def _carried(first: list[fx.Node], last: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Return, for each node that `first` reads from before it, the node of `first` that `last` reads instead."""
    twin = dict(zip(first, last, strict=True))
    carried: dict[fx.Node, fx.Node] = {}
    common: set[fx.Node] = set()

    def equal(one: Any, other: Any) -> bool:
        if isinstance(one, fx.Node) and isinstance(other, fx.Node):
            if one in twin:
                return twin[one] is other
            if one is other:
                common.add(one)
                return True
            if other not in twin or other.op != "call_function" or _type(one) != _type(other):
                return False
            return carried.setdefault(one, other) is other
        if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
            return len(one) == len(other) and all(map(equal, one, other))
        if isinstance(one, dict) and isinstance(other, dict):
            return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
        return type(one) is type(other) and repr(one) == repr(other)

    for one, other in twin.items():
        same = (one.op, _type(one)) == (other.op, _type(other))
        if one.op == "call_function":
            same = same and one.target == other.target and equal((one.args, one.kwargs), (other.args, other.kwargs))
        if not same:
            raise _UnequalError(f"{one.format_node()} and {other.format_node()}")
    both = common & carried.keys()
    if both:
        raise _UnequalError(f"{both.pop()} is what comes from the layer before, and more")
    return carried


def _type(node: fx.Node) -> str:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return "; ".join(
        f"{each.dtype}{list(each.shape)}{list(each.stride())}" if isinstance(each, Tensor) else str(each)
        for each in values
    )
