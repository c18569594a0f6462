"""The step of a lowered program as a list of launches, and the kernels that they name.

A launch is data: which kernel for how many rows, and where each of its arguments lies (`calls.Call`). Whoever runs it computes
each address once, since a value's place does not depend on the step. What TensorRT computes between them is a call of an engine,
which stands among the launches and is data too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from inferc.codegen.kernel import Kernel
from inferc.codegen.segments import Segment, row_kinds, segment_of, segments_of
from inferc.codegen.select import chosen_kernel, needs_kernel
from inferc.codegen.triton.aot.build import Cubin
from inferc.codegen.triton.aot.builders import Builders, Job
from inferc.codegen.triton.aot.launch import FAST, INVARIANT, SHARED
from inferc.codegen.triton.aot.occupancy import PROGRAMS
from inferc.codegen.triton.aot.source import Source
from inferc.codegen.triton.aot.tuning import library_choice, tuned
from inferc.codegen.triton.calls import Call, Choice
from inferc.codegen.triton.sampling_calls import sampling_launches
from inferc.codegen.triton.sampling_calls import scratch as sampling_scratch
from inferc.codegen.triton.table import KERNELS
from inferc.codegen.values import Operand, Place, Values, outputs
from inferc.errors import UnsupportedError
from inferc.ir.program import Program, ancestors, dtype_name, name_of

DIGEST_LENGTH = 10
KV_ORDER = "block, layer, kv head, k v, token, head_dim"


@dataclass(frozen=True)
class CudaStep:
    """What runs a program, as data.

    launches: before a step ("begin"), up to the rows that the LM head reads ("step"), of up to so many of these rows at a time
    ("head"), from their logits to ids ("sample") or to the likelihood of given ones ("score"). A launch is {"node", "layer",
    "rows", "only", "order", "choices": [{"kernel", "up_to"}], "arguments", "writes"}, as `calls.Call` says; or the call of an engine: {"node",
    "layer", "rows", "engine", "num_ops", "shapes", "arguments", "writes"}, where "shapes" has those of the engine's tensors that depend on
    the step, by name, "tokens" or "rows" in front; what the sampling kernels go by besides is
    {"state"}, {"output"} and {"scratch"}. scratch: memory that is zero at first and belongs to launches, by name: the bytes
    "const", "per_token" of a step, "per_seq" and "per_row" that is sampled at a time; "order": only that one needs it.
    observable: the values that launches write, by "id". shared_prefixes: by KV group, how many sequences that share a prefix
    have it read once, "members", and of what number of keys it is a multiple, "keys". sources: by name of the kernel.
    """

    launches: dict[str, list[dict[str, Any]]]
    scratch: dict[str, dict[str, Any]]
    observable: list[dict[str, Any]]
    shared_prefixes: dict[str, dict[str, int]]
    sources: dict[str, Source]

    @property
    def program_json_fields(self) -> dict[str, Any]:
        """What the runner reads of it."""
        return {
            "launches": self.launches,
            "scratch": self.scratch,
            "observable": self.observable,
            "shared_prefixes": self.shared_prefixes,
            "kv_layout": {"order": KV_ORDER},
        }

    @property
    def for_many_rows(self) -> set[str]:
        """The kernels of the fast order that are for any number of rows, in whose place a library may compute."""
        launches = (launch for part in self.launches.values() for launch in part)
        return {launch["choices"][-1]["kernel"] for launch in launches if launch.get("order") == FAST}

    def compile(self, arch: str, builders: Builders, *, assemble: bool = True) -> Iterator[tuple[str, Cubin]]:
        """(name of the kernel, its cubin) for one chip, one after the other; `assemble`: not the PTX alone."""
        for_many_rows = self.for_many_rows
        own = [_for_chip(name, source, arch) for name, source in self.sources.items()]
        jobs = [
            Job(source, name, source.function.__name__, arch, assemble)
            for name, source in zip(self.sources, own, strict=True)
        ]
        for (name, source), cubin in zip(self.sources.items(), builders.build(jobs), strict=True):
            # PTX is for chips that nothing was measured on.
            left = assemble and name in for_many_rows
            library = library_choice(_kernel(name), source, arch) if left else None
            yield name, replace(cubin, record=replace(cubin.record, library=library))


def _kernel(name: str) -> str:
    """Without what tells its specialisations apart."""
    return name.rpartition("-")[0]


def _for_chip(name: str, source: Source, arch: str) -> Source:
    """With what was measured on it, and as many programs of decode attention as it has room for."""
    own = tuned(_kernel(name), source, arch)
    if "NUM_PROGRAMS" not in own.constants:
        return own
    return replace(own, constants={**own.constants, "NUM_PROGRAMS": PROGRAMS[arch]})


def emit(program: Program, places: Mapping[str, Place], kernels: tuple[Kernel, ...] = KERNELS) -> CudaStep:
    """The launches of `program`; places: where each value with storage lies, by node name.

    Raises UnsupportedError naming the node for an op without a Triton kernel.
    """
    hidden, logits = outputs(program)
    if logits is None:
        raise UnsupportedError("a pipeline stage without the LM head: the cuda target runs one GPU")
    of_step = ancestors([hidden])
    sampled = frozenset(node for node in program.graph.nodes if node.op == "call_function" and node not in of_step)
    # What engines compute is in no order that may be asked for.
    made = _Emission(kernels, (FAST,) if segments_of(program) else (FAST, INVARIANT))
    step = made.launches(Values(program, places), [node for node in program.graph.nodes if node in of_step])
    values = Values(program, places, sampled)
    head = made.launches(values, [node for node in program.graph.nodes if node in sampled])
    at = values.operand(logits)
    where = {"value": at.pool, "offset": at.offset, "column": at.column, "stride": at.stride}
    around = {
        name: [
            made.add(Call(None, kernel, rows, (Choice(source),), arguments, []))
            for kernel, rows, source, arguments in each
        ]
        for name, each in sampling_launches(at.width, where).items()
    }
    launches = {
        "begin": [*around["begin"], *made.begin],
        "step": step,
        "head": head,
        "sample": around["sample"],
        "score": around["score"],
    }
    scratch = {**sampling_scratch(at.width), **made.scratch}
    return CudaStep(launches, scratch, made.observable, made.shared_prefixes, made.sources)


@dataclass
class _Emission:
    """Collects the sources and the values of launches as these are made."""

    kernels: tuple[Kernel, ...]
    orders: tuple[str, ...]  # of addition, whose launches are made
    sources: dict[str, Source] = field(default_factory=dict)
    observable: list[dict[str, Any]] = field(default_factory=list)
    scratch: dict[str, dict[str, Any]] = field(default_factory=dict)
    begin: list[dict[str, Any]] = field(default_factory=list)
    shared_prefixes: dict[str, dict[str, int]] = field(default_factory=dict)
    numbers: dict[fx.Node, int] = field(default_factory=dict)

    def launches(self, values: Values, nodes: Sequence[fx.Node]) -> list[dict[str, Any]]:
        """Of nodes, each of which makes a call or several; those of a segment make one."""
        made = []
        segments = {segment.nodes[0]: segment for segment in segments_of(values.program)}
        for node in nodes:
            if node in segments:
                made.append(self.engine_call(segments[node], values))
            elif needs_kernel(node) and segment_of(node) is None:
                calls: Call | tuple[Call, ...] = chosen_kernel(node, "triton", self.kernels).load_emit()(node, values)
                every = calls if isinstance(calls, tuple) else (calls,)
                made += [self.add(call) for call in every if not call.order or call.order in self.orders]
        return made

    def add(self, call: Call) -> dict[str, Any]:
        named = []
        for choice in call.choices:
            name = kernel_name(call.kernel, choice.source)
            self.sources[name] = choice.source
            named.append({"kernel": name, "up_to": choice.up_to})
        for each in map(self.add, call.begin):
            if each not in self.begin:
                self.begin.append(each)
        for name, each_size in call.scratch.items():
            size = {**each_size, **({"order": call.order} if call.order else {})}
            assert self.scratch.setdefault(name, size) == size, (
                f"{call.kernel}: {name} is {self.scratch[name]} elsewhere"
            )
        if call.only == SHARED and "cache_ptr" in call.arguments:
            constants = call.choices[0].source.constants
            members = int(constants["BLOCK_M"]) // int(constants["GROUP"])
            of_group = self.shared_prefixes.setdefault(str(call.arguments["cache_ptr"]["cache"]), {})
            of_group["members"] = min(members, of_group.get("members", members))
            of_group["keys"] = int(constants["UNIT"])
        return {
            "node": call.kernel if call.node is None else name_of(call.node),
            "layer": None if call.node is None else call.node.meta.get("layer"),
            "rows": call.rows,
            **({"only": call.only} if call.only else {}),
            **({"order": call.order} if call.order else {}),
            "choices": named,
            "arguments": call.arguments,
            "writes": [self._observed(value, operand) for value, operand in call.writes],
        }

    def engine_call(self, segment: Segment, values: Values) -> dict[str, Any]:
        given = {**segment.inputs, **segment.outputs}
        sizes = {name: node.meta["val"].shape for name, node in given.items() if node.op != "get_attr"}
        kinds = row_kinds(values.program)
        return {
            "node": f"segment {segment.number}",
            "layer": segment.layer,
            "rows": segment.rows,
            "engine": segment.engine,
            "num_ops": len(segment.nodes),
            "shapes": {name: [kinds[str(first)], *map(int, rest)] for name, (first, *rest) in sizes.items()},
            "arguments": {name: _in_a_row(node, values) for name, node in given.items()},
            "writes": [self._observed(node, values.operand(node)) for node in segment.outputs.values()],
        }

    def _observed(self, node: fx.Node, at: Operand) -> dict[str, Any]:
        """Where a value lies, and its number among the observable ones."""
        value = node.meta["val"]
        if node not in self.numbers:
            self.numbers[node] = len(self.numbers)
            self.observable.append(
                {
                    "id": self.numbers[node],
                    "name": name_of(node),
                    "layer": node.meta.get("layer"),
                    "dtype": dtype_name(value.dtype),
                    "shape": [int(size) for size in value.shape[1:]],
                }
            )
        place = {"value": at.pool, "offset": at.offset, "column": at.column, "stride": at.stride}
        return {"id": self.numbers[node], **place}


def _in_a_row(node: fx.Node, values: Values) -> dict[str, Any]:
    """Where a tensor of an engine lies."""
    if node.op == "get_attr":
        return {"weight": str(node.target)}
    if node.op == "placeholder":
        return {"input": node.name}
    at = values.operand(node)
    assert at.stride == at.width and not at.column, f"{name_of(node)}: rows of {at.width} elements, {at.stride} apart"
    return {"value": at.pool, "offset": at.offset, "column": 0}


def kernel_name(kernel: str, source: Source) -> str:
    """Of the kernel as it is specialised: the same for the same choices."""
    facts = [source.signature, source.constants, source.grid, source.num_warps, source.num_stages, source.aligned]
    return f"{kernel}-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:DIGEST_LENGTH]}"
