"""Determine which values of a program are split together when its columns and heads are spread over ranks.

Axis 1 of a value is its columns ([num_tokens, columns]) or heads ([num_tokens, heads, dim]). An op that works on each
of them alone ties its inputs and its result into one **region**; a linear begins a region with its result and ends one
with its input. A region can be split unless an op in it reads all columns at once: that op pins the region. An op
without a rule pins it too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from inferc.errors import UnsupportedError
from inferc.ir.program import Program, arguments, name_of, target_name
from inferc.passes.fuse.pointwise import OPS

aten, inferc = torch.ops.aten, torch.ops.inferc
ELEMENTWISE = frozenset({*OPS, inferc.silu_mul.default, inferc.gelu_mul.default, aten.clone.default})
NORMS = (inferc.rms_norm.default, inferc.layer_norm.default)


@dataclass
class Region:
    """A set of values that are split together.

    Axis 1 is cut in whole units: the heads of the region, or single columns.
    """

    values: list[fx.Node] = field(default_factory=list)
    pinned_by: fx.Node | None = None
    attention: fx.Node | None = None  # the attention whose queries (or keys) the region holds
    is_kv: bool = False

    @property
    def num_units(self) -> int:
        return min(int(node.meta["val"].shape[1]) for node in self.values)

    @property
    def splits(self) -> bool:
        return self.pinned_by is None


def has_rows(program: Program, node: Any) -> bool:
    """Return whether axis 0 of a value is the step's tokens and the value has columns."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    tokens = program.inputs()[0].meta["val"].shape[0]
    return isinstance(value, Tensor) and value.dim() > 1 and str(value.shape[0]) == str(tokens)


def is_weight(node: Any) -> bool:
    return node is None or (isinstance(node, fx.Node) and node.op == "get_attr")


def find_head(program: Program) -> fx.Node | None:
    """Return the LM head: the linear from which the program's only result is computed by elementwise ops alone."""
    results = program.output().all_input_nodes
    node = results[0] if len(results) == 1 and program.info.hidden_out is not True else None
    while node is not None and node.target in ELEMENTWISE:
        rows = [each for each in node.all_input_nodes if each.op == "call_function"]
        node = rows[0] if len(rows) == 1 else None
    return node if node is not None and node.target == aten.linear.default else None


class Regions:
    """The regions of a program; `of[node]` is the region of each value with rows and columns."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.of: dict[fx.Node, Region] = {}
        for node in program.graph.nodes:
            if has_rows(program, node):
                self.of[node] = Region([node])
        for node in program.graph.nodes:
            if node.op == "call_function":
                self._call(node)
            elif node.op == "placeholder":
                self._pin(node, node)
            elif node.op == "output":
                for each in node.all_input_nodes:
                    self._pin(each, node)
        self.head = find_head(program)
        if self.head is not None:
            # The head splits its result, the vocabulary, instead.
            self._pin(self.head.args[0], self.head)
        self._check_units()
        self._part_neighbours()
        self._check_attention()

    def all(self) -> list[Region]:
        return list({id(region): region for region in self.of.values()}.values())

    def split(self, node: Any) -> Region | None:
        """Return the region of `node` if its columns are split, or None."""
        region = self.of.get(node) if isinstance(node, fx.Node) else None
        return region if region is not None and region.splits else None

    def _tie(self, *nodes: fx.Node) -> Region:
        first = self.of[nodes[0]]
        for node in nodes[1:]:
            other = self.of[node]
            if other is not first:
                first.values += other.values
                first.pinned_by = first.pinned_by or other.pinned_by
                first.attention = first.attention or other.attention
                first.is_kv = first.is_kv or other.is_kv
                for value in other.values:
                    self.of[value] = first
        return first

    def _pin(self, node: Any, why: fx.Node) -> None:
        if node in self.of and self.of[node].pinned_by is None:
            self.of[node].pinned_by = why

    def _pin_all(self, node: fx.Node) -> None:
        for each in (node, *node.all_input_nodes):
            self._pin(each, node)

    def _call(self, node: fx.Node) -> None:
        if node.target == aten.linear.default and all(is_weight(each) for each in arguments(node)[1:]):
            return
        if node.target == inferc.attention.default:
            self._attention(node)
        elif node.target == inferc.rope.default:
            self._tie(node, arguments(node)[0])
            self._pin(arguments(node)[1], node)
        elif (
            node.target in NORMS
            and self._heads(node)
            and all(is_weight(each) for each in arguments(node)[1:3:2])
            or node.target == inferc.head_linear.default
            and is_weight(arguments(node)[1])
            or node.target == inferc.resize_heads.default
        ):
            self._tie(node, arguments(node)[0])
        elif node.target == aten.cat.default and self._heads(node) and arguments(node)[1] in (-1, 2):
            self._tie(node, *arguments(node)[0])
        elif (
            node.target == aten.slice.Tensor
            and self._heads(node)
            and arguments(node)[1] in (-1, 2)
            or node.target == aten.view.default
            and self._keeps_heads(node)
        ):
            self._tie(node, arguments(node)[0])
        elif node.target in ELEMENTWISE and node in self.of:
            self._elementwise(node)
        elif node.target == inferc.moe_experts.default and all(is_weight(each) for each in arguments(node)[3:7]):
            for each in node.all_input_nodes[:3]:
                self._pin(each, node)
        else:
            self._pin_all(node)

    def _heads(self, node: fx.Node) -> bool:
        return node in self.of and node.meta["val"].dim() == 3

    def _keeps_heads(self, view: fx.Node) -> bool:
        """Return whether a view is between [T, heads * dim] and [T, heads, dim], or changes nothing."""
        source = arguments(view)[0]
        if view not in self.of or source not in self.of:
            return False
        before, after = (list(each.meta["val"].shape[1:]) for each in (source, view))
        if before == after:
            return True
        whole, parts = sorted((before, after), key=len)
        return len(whole) == 1 and len(parts) == 2 and parts[0] > 1 and whole[0] == parts[0] * parts[1]

    def _attention(self, node: fx.Node) -> None:
        q, k, v, sinks, *_, alibi = arguments(node)
        region = self._tie(node, q)
        region.attention = region.attention or node
        if not is_weight(sinks) or not is_weight(alibi):
            self._pin(q, node)
        # A single head is shared by all query heads: it is a latent, or multi-query attention.
        if int(k.meta["val"].shape[1]) == 1:
            self._pin(k, node)
            self._pin(v, node)
            return
        kv = self._tie(k, v)
        kv.attention, kv.is_kv = kv.attention or node, True

    def _elementwise(self, node: fx.Node) -> None:
        columns = node.meta["val"].shape[1:]
        for each in node.all_input_nodes:
            if each in self.of and each.meta["val"].dim() == node.meta["val"].dim():
                if each.meta["val"].shape[1] == columns[0]:
                    self._tie(node, each)
                else:
                    self._pin(each, node)  # the value has one number for all columns
            elif not is_weight(each):
                self._pin(node, node)

    def _check_units(self) -> None:
        """Pin the regions in which some value's axis 1 is no multiple of the region's units."""
        for region in self.all():
            units = region.num_units
            odd = next((node for node in region.values if node.meta["val"].shape[1] % units), None)
            if odd is not None or units == 1:
                region.pinned_by = region.pinned_by or odd or region.values[0]

    def _part_neighbours(self) -> None:
        """Pin one of two split regions around a linear, which splits its columns or its rows, not both.

        The region that belongs to an attention stays split.
        """
        for node in self.program.graph.find_nodes(op="call_function", target=aten.linear.default, sort=True):
            before, after = self.split(node.args[0]), self.split(node)
            if before is not None and after is not None:
                (before if after.attention is not None and before is not after else after).pinned_by = node

    def _check_attention(self) -> None:
        for node in self.program.graph.find_nodes(op="call_function", target=inferc.attention.default, sort=True):
            for each in arguments(node)[:2]:
                by = self.of[each].pinned_by
                if by is not None and (each is arguments(node)[0] or int(each.meta["val"].shape[1]) > 1):
                    raise UnsupportedError(
                        f"{name_of(node)}: its heads cannot be split over tp ranks, as {target_name(by.target)}"
                        f" ({name_of(by)}) needs all of them at once; use --tp 1"
                    )
