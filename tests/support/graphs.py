"""Small programs traced from functions, with the data to run them: for tests of the passes."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.proxy import GraphAppendingTracer

from inferc.ir import weights as weight_lib
from inferc.ir.program import Program, new_program
from inferc.ir.weights import read_whole
from inferc.passes.rewrite import infer_types
from inferc.passes.verify import verify

TOKENS = 5  # every input axis of this size is the number of tokens


@dataclass
class Tensors:
    """A TensorReader over a dict."""

    tensors: dict[str, Tensor]

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        return self.tensors[name][start:stop]


@dataclass
class Example:
    """A program and one set of inputs and weights for it."""

    program: Program
    inputs: dict[str, Tensor]
    reader: Tensors

    def run(self) -> tuple[Tensor, ...]:
        weights = self.program.weights
        results: tuple[Tensor, ...] = self.program.run(self.inputs, lambda name: read_whole(weights[name], self.reader))
        return results

    def check(self, each: Callable[[Program], int], count: int, golden: str, tolerance: float = 1e-6) -> None:
        """The three assertions of a pass test: rewrites, printed graph, results before and after."""
        before = self.run()
        made = each(self.program)
        assert made == count, f"{made} rewrites; the program is now\n{self.program.to_text()}"
        verify(self.program)
        text = self.program.to_text()
        assert text == textwrap.dedent(golden).lstrip("\n"), f"the program is now\n{text}"
        torch.testing.assert_close(self.run(), before, rtol=tolerance, atol=tolerance)

    def check_untouched(self, each: Callable[[Program], int]) -> None:
        """The graph where a pass must not fire."""
        before = self.program.to_text()
        assert each(self.program) == 0
        assert self.program.to_text() == before


def example(
    function: Callable[..., Any], inputs: dict[str, Tensor], weights: dict[str, Tensor] | None = None
) -> Example:
    """Trace `function`, whose parameters name inputs and weights (`a__b` for the weight `a.b`)."""
    weights = weights or {}
    program = new_program("example")
    tokens = program.new_symbol(TOKENS)
    tracer = GraphAppendingTracer(program.graph)
    proxies: dict[str, fx.Proxy] = {}
    for name, value in inputs.items():
        node = program.graph.placeholder(name)
        sizes = [tokens if size == TOKENS else size for size in value.shape]
        node.meta.update(val=program.fake(sizes, value.dtype), name=name, layer=None)
        proxies[name] = fx.Proxy(node, tracer)
    for name, value in weights.items():
        program.weights[name] = weight_lib.source(name, tuple(value.shape), value.dtype)
        node = program.graph.get_attr(name)
        node.meta.update(val=program.fake(value.shape, value.dtype), name=name, layer=0)
        proxies[name.replace(".", "__")] = fx.Proxy(node, tracer)
    result = function(**{name: proxies[name] for name in inspect.signature(function).parameters})
    results = result if isinstance(result, tuple) else (result,)
    program.graph.output(tuple(proxy.node for proxy in results))
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    for node in calls:
        node.meta.update(name=node.name, layer=0)
    infer_types(program, calls)
    verify(program)
    return Example(program, inputs, Tensors(weights))


def rows(*sizes: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Random [TOKENS, *sizes]."""
    return random(TOKENS, *sizes, dtype=dtype, seed=seed)


def random(*sizes: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sizes, generator=generator).to(dtype)
