"""The kinds of a program's layers, by what their nodes do, and the programs of a model's first layers alone."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace
from torch import Tensor, fx

from inferc.ir import program as program_lib
from inferc.ir.program import Printer, Program, named_arguments, target_name
from inferc.ir.weights import Weight

Kind = tuple[str, ...]
PAGED_CACHE_DIMS, DENSE_CACHE_DIMS = 6, 4


def layer_nodes(program: Program) -> dict[int, list[fx.Node]]:
    """Return the call nodes of each layer, in order."""
    layers: dict[int, list[fx.Node]] = {layer: [] for layer in range(program.info.num_attention_layers)}
    for node in program.graph.nodes:
        if node.op == "call_function" and node.meta["layer"] is not None:
            layers[node.meta["layer"]].append(node)
    return layers


def layer_kinds(program: Program, *, ignore_inputs: bool = False) -> list[Kind]:
    """Return for each layer a value that is equal for layers that do the same with their own weights.

    It covers ops, arguments, shapes, dtypes, the expressions of weights, and what is read from outside of the layer:
    the same values in front of the layers, and values at the same place of the layer before. Values are equal across
    programs too.
    ignore_inputs: compare values of other layers and of the embedding by their types alone, so that the first layer is
    of the kind of the second.
    """
    tokens = _of_tokens(program)
    layers = {layer: [node for node in nodes if node in tokens] for layer, nodes in layer_nodes(program).items()}
    places = {node: (layer, index) for layer, nodes in layers.items() for index, node in enumerate(nodes)}
    printer = Printer(program)
    types = {node: _type(printer, node.meta.get("val")) for node in program.graph.nodes if node.op != "output"}
    outside: dict[tuple[fx.Node, int], str] = {}  # what is computed from no token, as digests of the expressions

    def read(node: fx.Node, layer: int) -> str:
        if node.op == "get_attr":
            return f"@{_weight_text(program.weight(node), layer)}"
        value = node.meta.get("val")
        dims = value.dim() if isinstance(value, Tensor) else 0
        if dims == PAGED_CACHE_DIMS:  # each layer of a group returns the cache that the layer before it returned
            return types[node]
        if node.op == "placeholder":
            own = re.sub(rf"(?<!\d){layer}(?!\d)", "#", node.name) if dims == DENSE_CACHE_DIMS else node.name
            return f"{own} {types[node]}"
        is_inside = node in places and places[node][0] == layer
        if ignore_inputs and node in tokens and not is_inside:
            return types[node]
        if node not in places:
            if (node, layer) not in outside:
                outside[node, layer] = hashlib.sha256(call(node, layer).encode()).hexdigest()[:16]
            return outside[node, layer]
        other, index = places[node]
        return f"{index}" if is_inside else f"{index - len(layers[other])} of {layer - other} before"

    def text(argument: Any, layer: int) -> str:
        if isinstance(argument, fx.Node):
            return read(argument, layer)
        if isinstance(argument, (tuple, list)):
            return f"[{', '.join(text(each, layer) for each in argument)}]"
        return printer.arg(argument)

    def call(node: fx.Node, layer: int) -> str:
        args, kwargs = [text(each, layer) for each in node.args], text(tuple(sorted(node.kwargs.items())), layer)
        if "layer" in _parameters(node):
            args[_parameters(node).index("layer")] = _stored_by(program, node, layer)
        return f"{types[node]} {target_name(node.target)}({', '.join(args)}, {kwargs})"

    return [tuple(call(node, layer) for node in nodes) for layer, nodes in layers.items()]


def _of_tokens(program: Program) -> set[fx.Node]:
    """Return the nodes that depend on the tokens, unlike tables of positions, which a layer may hold for all others."""
    found: set[fx.Node] = set()
    for node in program.graph.nodes:
        given = node.op == "placeholder" and node.name in ("token_ids", "hidden_in")
        if given or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _type(printer: Printer, value: Any) -> str:
    """Return a value's type; that of a paged cache without the number of layers that share it."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_type(printer, each) for each in value)})"
    if isinstance(value, Tensor) and value.dim() == PAGED_CACHE_DIMS:
        sizes = [printer.size(size) for size in (value.shape[0], *value.shape[2:])]
        return f"{program_lib.dtype_name(value.dtype)} cache {sizes}"
    return printer.type(value)


def _parameters(node: fx.Node) -> list[str]:
    schema = getattr(node.target, "_schema", None)
    return [each.name for each in schema.arguments] if schema is not None else []


def _stored_by(program: Program, node: fx.Node, layer: int) -> str:
    """Return which layer stored the K and V that a node of `layer` writes or reads, counted back from `layer`."""
    named = named_arguments(node)
    caches = [each for each in node.all_input_nodes if _is_paged_cache(each)]
    group = program.kv_groups[_group_of(caches[0])]
    return f"stored {layer - group.layers[named['layer']]} before"


def _is_paged_cache(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dim() == PAGED_CACHE_DIMS


def _group_of(cache: fx.Node) -> int:
    """Return the number of the KV group whose cache a value is, by the input that it was made of."""
    while cache.op != "placeholder":
        source = [each for each in cache.all_input_nodes if _is_paged_cache(each)]
        cache = source[0] if source else cache.all_input_nodes[0]  # an element of a call's several results
    return int(cache.name.rpartition("_")[2])


def _weight_text(weight: Weight, layer: int) -> str:
    """Return a weight's expression with # for the layer's own number in the names of stored tensors."""
    text = re.sub(r"[\w.]+", lambda name: re.sub(rf"(?<=\.){layer}(?=\.)", "#", name[0], count=1), str(weight))
    data = b"".join(leaf.data for leaf in weight.sources())
    return f"{text} {hashlib.sha256(data).hexdigest()[:16]}" if data else text


def distinct_prefix(kinds: Sequence[Kind]) -> int:
    """Return how many layers, from the first on, contain every kind of layer of a program."""
    return max(kinds.index(kind) for kind in set(kinds)) + 1


def prefix_lengths(kinds: Sequence[Kind]) -> list[int]:
    """Return, rising, how many of a captured program's first layers make a whole model with every kind of layer.

    Such a model ends with a layer of the same kind as the last, so that what follows the layers reads the same.
    """
    return [count for count in range(distinct_prefix(kinds), len(kinds) + 1) if kinds[count - 1] == kinds[-1]]


def first_layers(program: Program, count: int) -> Program | None:
    """Return a captured program of the first `count` layers, which what follows the layers reads in place of the last.

    count: one of `prefix_lengths`. The result is None where something reads a later layer that the shorter model lacks.
    """
    copy = program_lib.copy(program)
    layers = layer_nodes(copy)
    total = len(layers)
    twins = dict(zip(layers[total - 1], layers[count - 1], strict=True)) if count < total else {}
    for node in copy.graph.nodes:
        if node.op == "get_attr" or node.meta.get("layer") is not None:
            continue
        for source in node.all_input_nodes:
            if (source.meta.get("layer") or 0) < count or source.op == "get_attr":
                continue
            if source not in twins:
                return None
            node.replace_input_with(source, twins[source])
    copy.drop_unused()
    copy.num_layers = count
    copy.info = replace(copy.info, num_attention_layers=count)
    return copy
