"""Spread a program over ranks: heads and columns of each layer over `tp`, layers over `pp`.

It runs before projections are packed and residuals fused, so that each rank's program is packed and fused like any
other. A linear whose result is split keeps some rows of its weight. A linear whose input is split keeps some columns;
its result is a **partial** sum, and an `all_reduce` completes it as late as the arithmetic allows: parallel blocks, or
routed and shared experts, are added first and reduced once. `shard_regions` decides which values are split.

Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
"""

from __future__ import annotations

import itertools

import torch
from msgspec.structs import replace
from torch import fx

from inferc.errors import UnsupportedError
from inferc.ir import program as program_lib
from inferc.ir import weights as weight_lib
from inferc.ir.program import Program, arguments, name_of
from inferc.passes.parallel.shard_regions import ELEMENTWISE, NORMS, Region, Regions
from inferc.passes.parallel.split_columns import split_columns
from inferc.passes.parallel.split_stages import split_stages
from inferc.passes.rewrite import infer_types

aten, inferc = torch.ops.aten, torch.ops.inferc
GROUP = "tp"
PANEL = weight_lib.PANEL


def shard(program: Program, tp: int = 1, pp: int = 1) -> list[list[Program]]:
    """Return one program per rank, as `tp` ranks for each of `pp` stages; `program` stays as it is.

    Raises UnsupportedError if heads do not divide, or if there is no way to split an op.
    """
    return [shard_tensors(stage, tp) for stage in split_stages(program, pp)]


def shard_tensors(program: Program, tp: int) -> list[Program]:
    """Return the programs of the `tp` ranks of one stage."""
    made = []
    for rank in range(tp):
        own = copy(program)
        if tp > 1:
            split_columns(own)
            _Sharder(own, rank, tp).run()
        own.info = replace(own.info, tp_rank=rank, tp_size=tp)
        made.append(own)
    return made


def copy(program: Program) -> Program:
    return program_lib.from_json(program_lib.to_json(program))


def cuts(size: int, parts: int) -> list[int]:
    """Return the bounds that cut [0, size) into `parts`.

    The parts are even if `size` divides; otherwise they are whole panels of 16, or smaller panels if there are too few.
    """
    if size % parts == 0:
        return [size // parts * part for part in range(parts + 1)]
    panel = PANEL
    while -(-size // panel) < parts and panel > 1:
        panel //= 2
    panels = -(-size // panel)
    return [min(panels * part // parts * panel, size) for part in range(parts + 1)]


class _Sharder:
    """A rewriter that turns a program into that of rank `rank` of `tp`, node by node."""

    def __init__(self, program: Program, rank: int, tp: int) -> None:
        self.program, self.graph, self.rank, self.tp = program, program.graph, rank, tp
        self.regions = Regions(program)
        self.shapes = {node: tuple(node.meta["val"].shape) for node in self.regions.of}
        self.units = {id(region): region.num_units for region in self.regions.all()}
        self.head = self.regions.head
        self.partial: set[fx.Node] = set()
        self.reduced: dict[fx.Node, fx.Node] = {}

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.op == "call_function":
                self._complete(node)
                self._rewrite(node)
                infer_types(self.program, [node])
                if self.head is not None and node is self.head:
                    self._gather(self.head)
            elif node.op == "output":
                for each in node.all_input_nodes:
                    if each in self.partial:
                        node.replace_input_with(each, self._reduce(each))
                node.meta.pop("val", None)
        self.program.drop_unused()

    # ------------------------------------------------------------------------------------------- ranges

    def range(self, region: Region, size: int) -> tuple[int, int]:
        """Return the rank's share of axis 1 of a value of the region."""
        units = self.units[id(region)]
        if region.attention is None:
            if units < self.tp:
                raise UnsupportedError(
                    f"{name_of(region.values[0])}: {units} columns cannot be split over {self.tp} tp ranks;"
                    " use a smaller --tp"
                )
            bounds = cuts(units, self.tp)
            low, high = bounds[self.rank], bounds[self.rank + 1]
        elif units % self.tp == 0:
            low, high = units * self.rank // self.tp, units * (self.rank + 1) // self.tp
        elif region.is_kv and self.tp % units == 0:  # several ranks share a head
            low = units * self.rank // self.tp
            high = low + 1
        else:
            raise self._heads_refused(region, units)
        return size // units * low, size // units * high

    def _heads_refused(self, region: Region, units: int) -> UnsupportedError:
        assert region.attention is not None
        heads = self.shapes[arguments(region.attention)[0]][1]
        fit = [
            n for n in range(2, heads + 1) if heads % n == 0 and (not region.is_kv or units % n == 0 or n % units == 0)
        ]
        what = "KV heads" if region.is_kv else "heads"
        choices = ", ".join(map(str, fit)) or "1"
        return UnsupportedError(
            f"{name_of(region.attention)}: {units} {what} do not divide over --tp {self.tp}; use --tp {choices}"
        )

    def _part(self, node: fx.Node, axis: int, low: int, high: int, before: fx.Node) -> fx.Node:
        """Return a node that reads [low, high) of a weight."""
        whole = self.program.weight(node)
        return self._weight(node, weight_lib.slice_(whole, axis, low, high), before)

    def _weight(self, node: fx.Node, weight: weight_lib.Weight, before: fx.Node) -> fx.Node:
        name = f"{node.target}.{GROUP}{self.rank}"
        while self.program.weights.get(name, weight) != weight:
            name += "_"
        return self.program.add_weight(name, weight, before=before)

    # --------------------------------------------------------------------------------------------- sums

    def _reduce(self, node: fx.Node) -> fx.Node:
        """Return the sum of a partial value over the ranks."""
        if node not in self.reduced:
            with self.graph.inserting_after(node):
                made = self.graph.call_function(inferc.all_reduce.default, (node, GROUP, self.tp))
            made.meta.update(name=f"{name_of(node)}.all_reduce", layer=node.meta.get("layer"))
            infer_types(self.program, [made])
            self.reduced[node] = made
        return self.reduced[node]

    def _complete(self, node: fx.Node) -> None:
        """Reduce the partial values that `node` reads, unless the result of `node` can be partial instead."""
        partial = [each for each in node.all_input_nodes if each in self.partial]
        if not partial:
            return
        rows = [each for each in node.args if isinstance(each, fx.Node)]
        alone = all(len(each.users) == 1 for each in partial)
        if (
            node.target in (aten.add.Tensor, aten.sub.Tensor)
            and alone
            and len(rows) == len(set(partial)) == 2
            or node.target == aten.mul.Tensor
            and alone
            and len(partial) == 1
            and rows.count(partial[0]) == 1
            or node.target == aten.div.Tensor
            and alone
            and partial == [node.args[0]]
        ):
            self.partial.add(node)
        else:
            for each in partial:
                node.replace_input_with(each, self._reduce(each))

    # --------------------------------------------------------------------------------------------- ops

    def _rewrite(self, node: fx.Node) -> None:
        region = self.regions.split(node)
        if node.target == aten.linear.default:
            self._linear(node, region)
        elif node.target == inferc.moe_experts.default:
            self._experts(node)
        elif region is not None:
            self._inside(node, region)

    def _linear(self, node: fx.Node, region: Region | None) -> None:
        x, weight, bias = arguments(node)
        source = self.regions.split(x)
        if region is not None or node is self.head:
            low, high = self._columns(node, region)
            parts = [None if each is None else self._part(each, 0, low, high, node) for each in (weight, bias)]
            node.args, node.kwargs = (x, *parts), {}
        elif source is not None:
            low, high = self.range(source, self.shapes[x][1])
            kept = bias if self.rank == 0 else None
            node.args, node.kwargs = (x, self._part(weight, 1, low, high, node), kept), {}
            self.partial.add(node)

    def _columns(self, node: fx.Node, region: Region | None) -> tuple[int, int]:
        size = self.shapes[node][1]
        if region is not None:
            return self.range(region, size)
        bounds = cuts(size, self.tp)
        return bounds[self.rank], bounds[self.rank + 1]

    def _gather(self, head: fx.Node) -> None:
        bounds = cuts(self.shapes[head][1], self.tp)
        sizes = [high - low for low, high in itertools.pairwise(bounds)]
        with self.graph.inserting_after(head):
            made = self.graph.call_function(inferc.all_gather.default, (head, GROUP, self.rank, sizes, -1))
        made.meta.update(name=f"{name_of(head)}.all_gather", layer=head.meta.get("layer"))
        head.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
        infer_types(self.program, [made])

    def _experts(self, node: fx.Node) -> None:
        """Give each rank some of the intermediate columns of every expert."""
        x, ids, weights, gate_up, down, gate_up_bias, down_bias, *how = arguments(node)
        inter = int(down.meta["val"].shape[2])
        if inter < self.tp:
            raise UnsupportedError(
                f"{name_of(node)}: {inter} columns an expert for {self.tp} tp ranks; use a smaller --tp"
            )
        low, high = cuts(inter, self.tp)[self.rank : self.rank + 2]

        def both(source: fx.Node) -> fx.Node:
            whole = self.program.weight(source)
            gate, up = (weight_lib.slice_(whole, 1, base + low, base + high) for base in (0, inter))
            return self._weight(source, weight_lib.concat((gate, up), 1), node)

        kept = down_bias if self.rank == 0 else None
        bias = None if gate_up_bias is None else both(gate_up_bias)
        node.args = (x, ids, weights, both(gate_up), self._part(down, 2, low, high, node), bias, kept, *how)
        node.kwargs = {}
        self.partial.add(node)

    def _inside(self, node: fx.Node, region: Region) -> None:
        """Adapt an op on the rank's own columns or heads: slice the weights and sizes that it names."""
        if node.target == aten.view.default:
            low, high = self.range(region, self.shapes[node][1])
            node.args = (node.args[0], [-1, high - low, *self.shapes[node][2:]])
        elif node.target == inferc.attention.default:
            *_, alibi = given = arguments(node)
            heads = self.range(region, self.shapes[node][1])
            for each in (given[3], alibi):
                if each is not None:
                    node.replace_input_with(each, self._part(each, 0, *heads, node))
        elif node.target == inferc.head_linear.default:
            x, weight = arguments(node)
            node.args = (x, self._part(weight, 0, *self.range(region, self.shapes[node][1]), node))
        elif node.target in NORMS or node.target in ELEMENTWISE:
            self._columns_of_weights(node, region)

    def _columns_of_weights(self, node: fx.Node, region: Region) -> None:
        """Slice the weights that differ by column or head of the result."""
        size, rank = self.shapes[node][1], len(self.shapes[node])
        for each in node.all_input_nodes:
            if each.op != "get_attr":
                continue
            shape = tuple(each.meta["val"].shape)
            axis = len(shape) - rank + 1  # broadcasting aligns the last axes
            if axis >= 0 and shape[axis] == size and size > 1:
                node.replace_input_with(each, self._part(each, axis, *self.range(region, size), node))
