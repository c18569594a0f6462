"""The launches of mixtures of experts, and the scratch memory that they need."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from inferc.codegen.triton.aot.source import Source
from inferc.codegen.triton.calls.builder import ROWS, Builder, Call, Choice
from inferc.codegen.triton.kernels import moe_experts as kernels
from inferc.codegen.triton.kernels.moe_routing import moe_routing as moe_routing_source
from inferc.codegen.values import Values
from inferc.ir.program import argument, dtype_name
from inferc.manifest_types import Scratch, Where

# Products use tiles of this many rows as long as experts have at most this many choices each, on average.
FEW_OF_EXPERT = 16


def moe_routing(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    logits, ids, weights = b.read("logits_ptr", "router_logits"), b.write("ids_ptr", 0), b.write("weights_ptr", 1)
    has_bias, bias = b.weight("bias_ptr", "bias"), b.arg("bias")
    source = moe_routing_source(
        (dtype_name(logits.dtype), dtype_name(logits.dtype if bias is None else bias.meta["val"].dtype)),
        ROWS[ids.pool],
        logits.width,
        int(b.arg("top_k")),
        (logits.stride, ids.stride, weights.stride),
        str(b.arg("score")),
        has_bias=has_bias,
        renormalize=bool(b.arg("renormalize")),
        scale=float(b.arg("scale")),
        groups=(int(b.arg("num_groups")), int(b.arg("topk_groups")), str(b.arg("group_score"))),
    )
    return b.done("moe_routing", ids, source)


def moe_experts(node: fx.Node, values: Values) -> tuple[Call, ...]:
    return _Experts(node, values).calls()


class _Experts:
    """The launches of one mixture-of-experts node.

    They sort the choices by expert, multiply by gate and up, multiply by down, and add up the results of each token's
    experts.
    """

    def __init__(self, node: fx.Node, values: Values) -> None:
        self.node, self.values = node, values
        names = ("x", "expert_ids", "expert_weights")
        self.x, self.ids, self.share = (values.operand(argument(node, name)) for name in names)
        down = argument(node, "down").meta["val"]
        self.experts, self.hidden, self.inner = (int(size) for size in down.shape)
        self.dtypes = dtype_name(self.x.dtype), dtype_name(down.dtype)
        self.rows, self.top_k = ROWS[self.x.pool], self.ids.width
        self.scales_input = bool(argument(node, "scale_input"))
        size = self.x.dtype.itemsize
        self.scratch = {
            "begins": Scratch(const=4 * (self.experts + 1)),
            "order": Scratch(per_token=self.top_k * 4),
            "inner": Scratch(per_token=self.top_k * self.inner * size),
            "result": Scratch(per_token=self.top_k * self.hidden * size),
        }

    def calls(self) -> tuple[Call, ...]:
        return (self._sort(), self._product("gate_up"), self._product("down"), self._sum())

    def _name(self, of: str) -> str:
        """Return the name of a buffer in scratch memory, which all layers share whose buffers have the same size."""
        size = self.scratch[of]
        return f"moe_{of}_{size.const + size.per_token}"

    def _builder(self, **scratch: str) -> Builder:
        b = Builder(self.node, self.values)
        b.arguments.update({f"{name}_ptr": Where(scratch=self._name(of)) for name, of in scratch.items()})
        return b

    def _done(self, b: Builder, kernel: str, *choices: Choice) -> Call:
        aligned = (replace(each, source=replace(each.source, unaligned=b.unaligned())) for each in choices)
        scratch = {self._name(of): size for of, size in self.scratch.items()}
        return replace(b.done(kernel, self.x, *aligned), scratch=scratch)

    def _sort(self) -> Call:
        b = self._builder(begins="begins", order="order")
        b.read("ids_ptr", "expert_ids")
        source = kernels.sort_choices(self.rows, self.experts, self.top_k, self.ids.stride)
        return self._done(b, "sort_choices", Choice(source))

    def _product(self, of: str) -> Call:
        gated = of == "gate_up"
        more: dict[str, Any] = {"gated": gated}
        if gated:
            b = self._builder(begins="begins", order="order", out="inner")
            b.read("x_ptr", "x")
            b.read("share_ptr", "expert_weights")
            n, k, stride = self.inner, self.hidden, self.x.stride
            more.update(activation=str(b.arg("activation")), alpha=float(b.arg("alpha")), limit=float(b.arg("limit")))
            more["scales_input"] = self.scales_input
        else:
            b = self._builder(begins="begins", order="order", out="result", x="inner")
            n, k, stride = self.hidden, self.inner, self.inner
        b.weight("weight_ptr", of)
        b.weight("scale_ptr", f"{of}_scale")
        more["has_bias"] = b.weight("bias_ptr", f"{of}_bias")

        def source(few: bool) -> Source:
            strides = (stride, self.share.stride)
            return kernels.grouped_linear(
                *self.dtypes, self.rows, self.experts, self.top_k, n, k, strides, few=few, **more
            )

        up_to = FEW_OF_EXPERT * self.experts // self.top_k
        return self._done(b, "grouped_linear", Choice(source(few=True), up_to), Choice(source(few=False)))

    def _sum(self) -> Call:
        b = self._builder(x="result")
        b.read("ids_ptr", "expert_ids")
        b.read("share_ptr", "expert_weights")
        out = b.write("out_ptr")
        strides = (self.ids.stride, self.share.stride, out.stride)
        how = (self.dtypes[0], self.rows, self.top_k, self.hidden, strides, not self.scales_input)
        return self._done(b, "sum_choices", Choice(kernels.sum_choices(*how)))
