"""The border between a model's layers: which layer each call runs with, and the hidden rows that cross into a layer."""

from __future__ import annotations

import math

from torch import fx

from inferc.errors import UnsupportedError
from inferc.ir.program import Program, ancestors, name_of

Stage = dict[fx.Node, int]
"""The number of the part of a model, a layer or several, that each call runs with."""


def layer_of(node: fx.Node) -> int:
    """Return the layer that a node is in, or -1 outside of all layers."""
    layer = node.meta.get("layer")
    return -1 if layer is None else int(layer)


def layers_of_calls(program: Program) -> Stage:
    """Return the layer that each call runs with: its own, or the highest of the calls before it."""
    of: Stage = {}
    latest = 0
    for node in program.graph.nodes:
        if node.op == "call_function":
            latest = max(latest, layer_of(node))
            # A call outside of all layers runs with the first layer, or with the highest one that precedes it in the
            # graph.
            of[node] = layer_of(node) if layer_of(node) >= 0 else latest
    return of


def value_before(program: Program, layer: int) -> fx.Node:
    """Return the hidden rows that enter a layer other than the first.

    Raises UnsupportedError if more than one value comes from the layers before it.
    """
    return crossing(layers_of_calls(program), layer, f"layer {layer}")


def crossing(stages: Stage, stage: int, what: str) -> fx.Node:
    """Return the one value that earlier stages compute from tokens and that `stage` or later ones read.

    what: the name of the stage in messages.
    """
    found = [
        node
        for node, at in stages.items()
        if at < stage and any(stages.get(user, math.inf) >= stage for user in node.users) and not _of_positions(node)
    ]
    if len(found) != 1:
        names = ", ".join(name_of(node) for node in found)
        raise UnsupportedError(f"{what}: {len(found)} values of tokens enter it ({names}); expected one")
    return found[0]


def _of_positions(node: fx.Node) -> bool:
    """Return whether a value depends on positions and weights alone."""
    inputs = {each.name for each in ancestors([node]) if each.op == "placeholder"}
    return inputs <= {"positions"}
