"""The step of a lowered program as a list of launches, and the kernels that they name.

A launch is data: which kernel for how many rows, and where each of its arguments lies (`calls.Call`). Whoever runs it computes
each address once, since a value's place does not depend on the step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from inferc.codegen.kernels import KERNELS, Kernel, chosen_kernel, needs_kernel
from inferc.codegen.triton.build import Cubin, build
from inferc.codegen.triton.calls import Call
from inferc.codegen.triton.source import Source
from inferc.codegen.values import Place, Values, outputs
from inferc.errors import UnsupportedError
from inferc.program import Program, ancestors, name_of

DIGEST_LENGTH = 10


@dataclass(frozen=True)
class CudaStep:
    """step: the launches up to the rows that the LM head reads; head: those of at most 64 of these rows at a time.

    A launch is {"node", "layer", "rows", "choices": [{"kernel", "up_to"}], "arguments"}, as `calls.Call` says. sources: by
    name of the kernel.
    """

    step: list[dict[str, Any]]
    head: list[dict[str, Any]]
    logits: dict[str, Any]
    sources: dict[str, Source]

    def compile(self, arch: str) -> dict[str, Cubin]:
        """The cubins for one chip, by name of the kernel."""
        return {name: build(source, name, source.function.__name__, arch) for name, source in self.sources.items()}


def emit(program: Program, places: Mapping[str, Place], kernels: tuple[Kernel, ...] = KERNELS) -> CudaStep:
    """The launches of `program`; places: where each value with storage lies, by node name.

    Raises UnsupportedError naming the node for an op without a Triton kernel.
    """
    hidden, logits = outputs(program)
    if logits is None:
        raise UnsupportedError("a pipeline stage without the LM head: the cuda target runs one GPU")
    of_step = ancestors([hidden])
    sampled = frozenset(node for node in program.graph.nodes if node.op == "call_function" and node not in of_step)
    sources: dict[str, Source] = {}
    step = _launches(Values(program, places), [n for n in program.graph.nodes if n in of_step], kernels, sources)
    values = Values(program, places, sampled)
    head = _launches(values, [node for node in program.graph.nodes if node in sampled], kernels, sources)
    at = values.operand(logits)
    where = {"value": at.pool, "offset": at.offset, "column": at.column, "stride": at.stride, "width": at.width}
    return CudaStep(step, head, where, sources)


def _launches(
    values: Values,
    nodes: Sequence[fx.Node],
    kernels: tuple[Kernel, ...],
    sources: dict[str, Source],
) -> list[dict[str, Any]]:
    made = []
    for node in nodes:
        if needs_kernel(node):
            call: Call = chosen_kernel(node, "triton", kernels).load_emit()(node, values)
            made.append(_launch(call, sources))
    return made


def _launch(call: Call, sources: dict[str, Source]) -> dict[str, Any]:
    choices = []
    for choice in call.choices:
        name = kernel_name(call.kernel, choice.source)
        sources[name] = choice.source
        choices.append({"kernel": name, "up_to": choice.up_to})
    return {
        "node": name_of(call.node),
        "layer": call.node.meta.get("layer"),
        "rows": call.rows,
        "choices": choices,
        "arguments": call.arguments,
    }


def kernel_name(kernel: str, source: Source) -> str:
    """Of the kernel as it is specialised: the same for the same choices."""
    facts = [source.signature, source.constants, source.grid, source.num_warps, source.num_stages, source.aligned]
    return f"{kernel}-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:DIGEST_LENGTH]}"
