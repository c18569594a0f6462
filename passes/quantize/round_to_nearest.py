"""Quantize weights, and for some schemes the rows they multiply, by rounding to nearest.

A weight becomes two expressions over the stored tensor: values in int8, fp8 or four bits, and a float32 scale per
output. In 8 bits decoding reads half the bytes of bfloat16. Nothing is calibrated: a scale is the largest magnitude
divided by the largest number of the format. Rows that several products read are quantized once.

What stays in the model's dtype is counted, with the reason: routers, whose choices tip on a rounding error; products
with a separate matrix per head; position tables.
"""

from __future__ import annotations

import logging
import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from msgspec.structs import replace
from torch import fx

from inferc.ir import weights as weight_lib
from inferc.ir.program import Program, arguments, named_arguments
from inferc.ir.weights import Weight
from inferc.manifest_types import Quantization
from inferc.passes.quantize.schemes import Scheme
from inferc.passes.rewrite import infer_types, no_rewrite

log = logging.getLogger(__name__)
aten, inferc = torch.ops.aten, torch.ops.inferc

LINEARS = (aten.linear.default, inferc.linear_add.default)
KEPT = {
    inferc.linear_wide.default: "routers",
    inferc.head_linear.default: "products by a matrix for each head",
}
# Ops that may lie between a router's product and the choice of experts.
BEFORE_ROUTING = (
    inferc.pointwise.default,
    aten._to_copy.default,
    aten.add.Tensor,
    aten.mul.Tensor,
    aten.view.default,
    aten.slice.Tensor,
)


@dataclass(frozen=True)
class _Format:
    """A format of 8 bits: the functions that quantize a weight, the op that quantizes rows, and the product of both."""

    values: Callable[[Weight], Weight]
    scales: Callable[[Weight], Weight]
    quantize_rows: Any
    linear: Any


_FORMATS = {
    "int8": _Format(
        weight_lib.int8_values, weight_lib.int8_scales, inferc.quantize_rows.default, inferc.linear_w8a8.default
    ),
    "fp8": _Format(
        weight_lib.fp8_values, weight_lib.fp8_scales, inferc.quantize_rows_fp8.default, inferc.linear_fp8.default
    ),
}

Reader = Literal["linear", "head", "experts"]
READERS: tuple[Reader, ...] = ("linear", "head", "experts")


@dataclass(frozen=True)
class Quantize:
    """A pass that quantizes the weights of products and, for some schemes, the rows that they read.

    It runs after projections are packed and fused with residuals, and after `select_rows`.

    rows_of: the readers whose rows are quantized too, if the scheme does that. The other readers get the rows
    unchanged, for kernels that quantize rows themselves.
    """

    scheme: Scheme
    rows_of: tuple[Reader, ...] = READERS
    name: str = "quantize"

    def __call__(self, program: Program) -> int:
        """Quantize the products, and record the scheme, the counts and the reasons in `program.info`.

        The artifact keeps that record.
        """
        run = _Run(program, self.scheme, self.rows_of if self.scheme.quantizes_rows else ())
        for node in list(program.graph.nodes):
            if node.op != "call_function":
                continue
            reason = _why_kept(node) or (_why_not_in_fp8(node) if self.scheme.format == "fp8" else "")
            if reason:
                run.kept[reason] += 1
                no_rewrite(self.name, node, f"it is among what stays in its dtype: {reason}")
            elif node.target in LINEARS:
                run.linear(node)
            elif node.target == inferc.moe_experts.default:
                run.experts(node)
            elif node.target == inferc.lm_head.default:
                run.head(node)
            elif node.target == aten.embedding.default:
                run.embedding(node)
        if run.count:
            program.drop_unused()
        done = Quantization(self.scheme.name, run.count, dict(run.kept))
        program.info = replace(program.info, quantization=done)
        kept = ", ".join(f"{what} ({count})" for what, count in run.kept.items())
        log.info("%s %s: %d products quantized; not: %s", self.name, self.scheme.name, run.count, kept or "nothing")
        return run.count


@dataclass
class _Run:
    program: Program
    scheme: Scheme
    rows_of: tuple[Reader, ...]
    count: int = 0
    kept: Counter[str] = field(default_factory=Counter)
    # By activation: its rows in 8 bits and their scales.
    rows: dict[fx.Node, tuple[fx.Node, fx.Node]] = field(default_factory=dict)

    def linear(self, node: fx.Node) -> None:
        x, weight, bias, *residual = arguments(node)
        in_four_bits = self.scheme.group > 0
        weights = self._int4_weight(weight, node) if in_four_bits else self._weight(weight, node)
        if "linear" in self.rows_of:
            call = inferc.linear_w4a8.default if in_four_bits else _FORMATS[self.scheme.format].linear
            args = (*self._rows(x, node), *weights, node.meta["val"].dtype, bias, *residual)
        else:
            call = inferc.linear_int4.default if in_four_bits else inferc.linear_int8.default
            args = (x, *weights, bias, *residual)
        self._replace(node, call, args)

    def head(self, node: fx.Node) -> None:
        """Quantize the LM head like other products, except that its float32 sums are not rounded."""
        x, weight, bias = arguments(node)
        values, scale = self._weight(weight, node)
        if "head" in self.rows_of:
            args = (*self._rows(x, node), values, scale, torch.float32, bias)
            self._replace(node, inferc.linear_w8a8.default, args)
        else:
            self._replace(node, inferc.linear_int8.default, (x, values, scale, bias, None, torch.float32))

    def embedding(self, node: fx.Node) -> None:
        weight, ids, *_ = arguments(node)
        args = (*self._weight(weight, node), ids, node.meta["val"].dtype)
        self._replace(node, inferc.embedding_int8.default, args)

    def experts(self, node: fx.Node) -> None:
        """Quantize the experts: their input here, once for all of them, and each activation inside of the op."""
        args = named_arguments(node)
        for name in ("gate_up", "down"):
            if self.scheme.group:
                args[name], args[f"{name}_group_scale"], args[f"{name}_scale"] = self._int4_weight(args[name], node)
            else:
                args[name], args[f"{name}_scale"] = self._weight(args[name], node)
        if "experts" in self.rows_of:
            args["dtype"] = args["x"].meta["val"].dtype
            args["x"], args["x_scale"] = self._rows(args["x"], node)
        self._replace(node, inferc.moe_experts.default, tuple(args.values()))

    def _weight(self, weight: fx.Node, before: fx.Node) -> tuple[fx.Node, ...]:
        expression = self.program.weight(weight)
        of, name = _FORMATS[self.scheme.format], str(weight.target)
        return (
            self.program.add_weight(f"{name}.{self.scheme.format}", of.values(expression), before=before),
            self.program.add_weight(f"{name}.scale", of.scales(expression), before=before),
        )

    def _int4_weight(self, weight: fx.Node, before: fx.Node) -> tuple[fx.Node, ...]:
        expression, group, name = self.program.weight(weight), self.scheme.group, str(weight.target)
        return (
            self.program.add_weight(f"{name}.int4", weight_lib.int4_values(expression, group), before=before),
            self.program.add_weight(
                f"{name}.int4_group_scale", weight_lib.int4_group_scales(expression, group), before=before
            ),
            self.program.add_weight(f"{name}.int4_scale", weight_lib.int4_scales(expression, group), before=before),
        )

    def _rows(self, x: fx.Node, before: fx.Node) -> tuple[fx.Node, fx.Node]:
        if x not in self.rows:
            base = str(x.meta.get("name", x.name))
            with self.program.graph.inserting_before(before):
                both = self.program.graph.call_function(_FORMATS[self.scheme.format].quantize_rows, (x,))
                values, scale = (self.program.graph.call_function(operator.getitem, (both, index)) for index in (0, 1))
            for made, name in ((both, "quantized"), (values, self.scheme.format), (scale, "scale")):
                made.meta.update(name=f"{base}.{name}", layer=before.meta.get("layer"))
            infer_types(self.program, [both, values, scale])
            self.rows[x] = (values, scale)
        return self.rows[x]

    def _replace(self, node: fx.Node, target: Any, args: tuple[Any, ...]) -> None:
        while args[-1] is None:
            args = args[:-1]
        with self.program.graph.inserting_before(node):
            made = self.program.graph.call_function(target, args)
        made.meta.update(name=node.meta.get("name", node.name), layer=node.meta.get("layer"))
        infer_types(self.program, [made])
        node.replace_all_uses_with(made)
        self.program.graph.erase_node(node)
        self.count += 1


def _why_kept(node: fx.Node) -> str:
    """Return why the node stays in its dtype, or "" if it is quantized or reads no weight that could be quantized."""
    if node.target in KEPT:
        return KEPT[node.target]
    if node.target == inferc.moe_experts.default:
        weights = arguments(node)[3:5]
    elif node.target in (*LINEARS, inferc.lm_head.default):
        weights = arguments(node)[1:2]
    elif node.target == aten.embedding.default:
        weights = arguments(node)[:1]
        if arguments(node)[1].target != "token_ids":
            return "tables of positions"
    else:
        return ""
    if any(not isinstance(each, fx.Node) or each.op != "get_attr" for each in weights):
        return "products by what is no weight"
    if any(not each.meta["val"].dtype.is_floating_point for each in weights):
        return "quantized products already"
    if node.target in LINEARS and node.args[0].meta["val"].dim() != 2:  # type: ignore[union-attr]
        return "products of what is not rows of tokens"
    return "routers" if _routes(node) else ""


def _why_not_in_fp8(node: fx.Node) -> str:
    """Return the kind of a node for which no kernel reads fp8, or "" if there is one."""
    if node.target == inferc.moe_experts.default:
        return "experts"
    return "embedding and LM head" if node.target in (inferc.lm_head.default, aten.embedding.default) else ""


def _routes(node: fx.Node) -> bool:
    return any(
        user.target == inferc.moe_routing.default or (user.target in BEFORE_ROUTING and _routes(user))
        for user in node.users
    )
