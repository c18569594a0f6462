"""Add LoRA adapters to a step: behind each product, what the adapter of each row's sequence adds to it.

The product itself stays as it is, quantized or not. Behind it come `lora_shrink`, which reads the product's input, and
`lora_expand`, which adds to the product's result in place. Passes that fuse a product with what follows it do not fuse
these. Where the parts of a packed product have adapters of their own (q, k and v), each is a site.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec import UNSET
from msgspec.structs import replace
from torch import fx

from inferc.ir.adapter_sites import Adapters, AdapterSite, IndexRun
from inferc.ir.program import Program, arguments, name_of
from inferc.passes.adapters.follow import ABSENT, Followed, follow
from inferc.passes.rewrite import infer_types, no_rewrite

log = logging.getLogger(__name__)
aten, inferc = torch.ops.aten, torch.ops.inferc
PRODUCTS = (aten.linear.default, inferc.linear_add.default, inferc.lm_head.default)


@dataclass(frozen=True)
class AddAdapters:
    """A pass that adds room for adapters of rank `rank` or less.

    It runs when projections are packed and residuals fused, and before weights are quantized. The table of sites goes
    into the facts of the program. Experts, routers and the projections of latent attention have no sites.
    """

    rank: int
    name: str = "add_adapters"

    def __call__(self, program: Program) -> int:
        if program.info.adapters is not UNSET:
            return 0
        sites = _Sites(program, self.rank)
        for node in list(program.graph.nodes):
            if node.op == "call_function" and node.target in PRODUCTS:
                sites.add_product(node)
            elif node.op == "call_function" and node.target == aten.embedding.default:
                sites.add_embedding(node)
        program.info = replace(program.info, adapters=Adapters(self.rank, sites.table))
        log.info("%s: %d sites of rank %d", self.name, len(sites.table), self.rank)
        return len(sites.table)


@dataclass
class _Sites:
    program: Program
    rank: int
    table: list[AdapterSite] = field(default_factory=list)
    size: int = 0  # elements of all sites so far, for each rank
    inputs: tuple[fx.Node, fx.Node] | None = None

    def add_product(self, node: fx.Node) -> None:
        x, weight, *_ = arguments(node)
        if weight.op != "get_attr":
            return
        parts = []
        for begin, end, part in follow(self.program.weight(weight)):
            if part is None:
                no_rewrite("add_adapters", node, f"outputs {begin} to {end} are not those of one stored matrix")
            else:
                parts.append((begin, end, part))
        if not parts:
            return
        k = int(x.meta["val"].shape[-1])
        first, offsets = len(self.table), [self._add("linear", node, begin, end, part, k) for begin, end, part in parts]
        ids, adapters = self._inputs()
        sites, rows = list(range(first, len(self.table))), self._rows(x)
        shrunk = self._call(
            node, "shrink", inferc.lora_shrink.default, (x, ids, rows, adapters, sites, offsets, self.rank)
        )
        ranges = [begin for begin, _, _ in parts], [end for _, end, _ in parts]
        self._expand(node, shrunk, (ids, rows, adapters, sites, [each + k for each in offsets], *ranges, self.rank))

    def add_embedding(self, node: fx.Node) -> None:
        weight, token_ids, *_ = arguments(node)
        if getattr(token_ids, "name", "") != "token_ids" or weight.op != "get_attr":
            return
        ((begin, end, part), *more) = follow(self.program.weight(weight))
        if part is None or more or part.outputs != list(range(end)):
            no_rewrite("add_adapters", node, "its rows are not those of one stored table, in order")
            return
        columns, site = len(part.inputs), len(self.table)
        offset = self._add("embedding", node, begin, end, part, columns)
        ids, adapters = self._inputs()
        args = (token_ids, ids, adapters, site, offset, self.rank, end)
        looked_up = self._call(node, "lookup", inferc.lora_lookup.default, args)
        self._expand(node, looked_up, (ids, None, adapters, [site], [offset + end], [0], [columns], self.rank))

    def _add(self, kind: Any, node: fx.Node, begin: int, end: int, part: Followed, k: int) -> int:
        """Add a row to the table of sites, and return its offset."""
        # The stored matrix of a tied head is that of the embedding, which has adapters of its own.
        is_tied = node.target == inferc.lm_head.default and self.program.info.tied_embeddings
        site = AdapterSite(
            kind,
            "lm_head" if is_tied else part.source.removesuffix(".weight"),
            node.meta.get("layer"),
            [*(part.stored_shape[::-1] if part.is_transposed else part.stored_shape)],
            end - begin,
            k,
            0 if kind == "embedding" else begin,
            runs(part.outputs, part.stored_shape[part.is_transposed]),
            runs(part.inputs, part.stored_shape[not part.is_transposed]),
        )
        self.table.append(site)
        offset, self.size = self.size, self.size + end - begin + k
        return offset

    def _inputs(self) -> tuple[fx.Node, fx.Node]:
        """Return the inputs of the step that adapters need, which are added at the first site."""
        if self.inputs is None:
            placed = self.program.inputs()
            tokens = placed[0].meta["val"].shape[0]
            dtype = getattr(torch, self.program.info.dtype)
            with self.program.graph.inserting_after(placed[-1]):
                ids = self.program.graph.placeholder("adapter_ids")
            with self.program.graph.inserting_after(ids):
                adapters = self.program.graph.placeholder("adapters")
            types = (
                self.program.fake((tokens,), torch.int32),
                # Both sizes are those of what is loaded, which no step depends on.
                self.program.fake((self.program.new_symbol(23), self.program.new_symbol(29)), dtype),
            )
            for node, value in zip((ids, adapters), types, strict=True):
                node.meta.update(val=value, name=node.name, layer=None)
            self.inputs = ids, adapters
        return self.inputs

    def _rows(self, x: fx.Node) -> fx.Node | None:
        """Return the input that says which token each row of `x` is; None if the rows are the tokens."""
        tokens = self.program.inputs()[0].meta["val"].shape[0]
        return None if str(x.meta["val"].shape[0]) == str(tokens) else self.program.input("logits_rows")

    def _expand(self, node: fx.Node, shrunk: fx.Node, rest: Sequence[Any]) -> None:
        made = self._call(shrunk, "expand", inferc.lora_expand.default, (node, shrunk, *rest), name_of(node))
        node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
        # Who reads the result knows it by the product's name.
        made.meta["name"], node.meta["name"] = name_of(node), f"{name_of(node)}.base"

    def _call(self, after: fx.Node, what: str, target: Any, args: tuple[Any, ...], of: str = "") -> fx.Node:
        with self.program.graph.inserting_after(after):
            made = self.program.graph.call_function(target, args)
        made.meta.update(name=f"{of or name_of(after)}.{what}", layer=after.meta.get("layer"))
        infer_types(self.program, [made])
        return made


def runs(indices: Sequence[int], size: int) -> list[IndexRun] | None:
    """Return indices as runs of equal steps, or None if they are all of [0, size) in order.

    A run of ABSENT indices has the step 0.
    """
    if list(indices) == list(range(size)):
        return None
    return list(_runs(indices))


def _runs(indices: Sequence[int]) -> Iterator[IndexRun]:
    at = 0
    while at < len(indices):
        step = indices[at + 1] - indices[at] if at + 1 < len(indices) else 1
        step = 0 if indices[at] == ABSENT else step
        end = at + 1
        while end < len(indices) and indices[end] == indices[at] + (end - at) * step:
            end += 1
        yield IndexRun(indices[at], end - at, step)
        at = end
