"""The step of a lowered program as a list of launches, and the kernels that they name.

A launch is data: which kernel runs for how many rows, and where each of its arguments lies. Whoever runs it computes
each address once, since a value's place does not depend on the step. Nodes that TensorRT computes become a call of an
engine, which stands among the launches and is data too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
from torch import fx

from inferc.arena import Place
from inferc.codegen.kernel import Kernel
from inferc.codegen.segments import Segment, row_kinds, segment_of, segments_of
from inferc.codegen.select import chosen_kernel, needs_kernel
from inferc.codegen.triton.aot.build import Cubin
from inferc.codegen.triton.aot.builders import Builders, Job
from inferc.codegen.triton.aot.occupancy import PROGRAMS
from inferc.codegen.triton.aot.source import Source
from inferc.codegen.triton.aot.tuning import library_choice, tuned
from inferc.codegen.triton.calls.builder import Call
from inferc.codegen.triton.calls.head_rows import HIDDEN_IN, head_input_call, keep_calls
from inferc.codegen.triton.calls.sampling import sampling_launches
from inferc.codegen.triton.calls.sampling import scratch as sampling_scratch
from inferc.codegen.triton.table import KERNELS
from inferc.codegen.values import Operand, Values, observable, outputs
from inferc.errors import UnsupportedError
from inferc.ir.program import Program, ancestors, name_of
from inferc.manifest import FAST, INVARIANT, SHARED
from inferc.manifest_types import (
    Choice,
    CubinPart,
    KvLayout,
    Launch,
    Launches,
    Observable,
    Scratch,
    SharedPrefixes,
    Where,
    Written,
)

DIGEST_LENGTH = 10
KV_ORDER = "block, layer, kv head, k v, token, head_dim"


@dataclass(frozen=True)
class CudaStep:
    """The launches, scratch memory and kernels that run a program, as data.

    scratch: the memory that belongs to launches, by name. observable: the values that launches write. shared_prefixes:
    by the number of a KV group. sources: the kernels, by name.
    """

    launches: Launches
    scratch: dict[str, Scratch]
    observable: list[Observable]
    shared_prefixes: dict[str, SharedPrefixes]
    sources: dict[str, Source]

    @property
    def part(self) -> CubinPart:
        """The fields of program.json that the runner reads."""
        return CubinPart(
            launches=self.launches,
            scratch=self.scratch,
            observable=self.observable,
            shared_prefixes=self.shared_prefixes,
            kv_layout=KvLayout(order=KV_ORDER),
        )

    @property
    def for_many_rows(self) -> set[str]:
        """The kernels of the fast order that take any number of rows, in whose place a library may compute."""
        return {launch.choices[-1].kernel for launch in self.launches if launch.order == FAST}

    def compile(self, arch: str, builders: Builders, *, assemble: bool = True) -> Iterator[tuple[str, Cubin]]:
        """Yield (name of a kernel, its cubin) for each kernel, compiled for one chip.

        Without `assemble`, the kernels are compiled to PTX only.
        """
        for_many_rows = self.for_many_rows
        own = [_for_chip(name, source, arch) for name, source in self.sources.items()]
        jobs = [
            Job(source, name, source.function.__name__, arch, assemble)
            for name, source in zip(self.sources, own, strict=True)
        ]
        for (name, source), cubin in zip(self.sources.items(), builders.build(jobs), strict=True):
            # PTX is for other chips, on which no library was measured.
            left = assemble and name in for_many_rows
            library = library_choice(_kernel(name), source, arch) if left else None
            yield name, replace(cubin, record=msgspec.structs.replace(cubin.record, library=library))


def _kernel(name: str) -> str:
    """Return a kernel's name without the digest that tells its specialisations apart."""
    return name.rpartition("-")[0]


def _for_chip(name: str, source: Source, arch: str) -> Source:
    """Return the source with what was measured to be best on the chip.

    Decode attention gets as many programs as the chip has room for at once.
    """
    own = tuned(_kernel(name), source, arch)
    if "NUM_PROGRAMS" not in own.constants:
        return own
    return replace(own, constants={**own.constants, "NUM_PROGRAMS": PROGRAMS[arch]})


def emit(program: Program, places: Mapping[str, Place], kernels: tuple[Kernel, ...] = KERNELS) -> CudaStep:
    """Return the launches of `program`; `places` says where each value with storage lies, by node name.

    Raises UnsupportedError naming the node for an op without a Triton kernel.
    """
    hidden, logits = outputs(program)
    if logits is None:
        raise UnsupportedError("a pipeline stage without the LM head: the cuda target runs one GPU")
    of_step = ancestors([hidden])
    sampled = frozenset(node for node in program.graph.nodes if node.op == "call_function" and node not in of_step)
    # An engine's order of addition is its own: a program with engines cannot offer the invariant order.
    made = _Emission(kernels, (FAST,) if segments_of(program) else (FAST, INVARIANT))
    step = made.launches(Values(program, places), [node for node in program.graph.nodes if node in of_step])
    values = Values(program, places, sampled)
    head = made.launches(values, [node for node in program.graph.nodes if node in sampled])
    at = values.operand(logits)
    around = {name: [made.add(call) for call in calls] for name, calls in sampling_launches(at).items()}
    begin, rows = [*around["begin"], *made.begin], list[Launch]()
    if (given := next((node for node in program.inputs() if node.name == HIDDEN_IN), None)) is not None:
        place, own = values.operand(given), int(hidden.meta["val"].shape[-1])
        begin.append(made.add(head_input_call(place, own)))
        rows = [made.add(call) for call in keep_calls(place, own)]
    launches = Launches(begin, step, head, **{part: around[part] for part in ("sample", "keep", "score")}, rows=rows)
    scratch = {**sampling_scratch(at.width), **made.scratch}
    return CudaStep(launches, scratch, made.observable, made.shared_prefixes, made.sources)


@dataclass
class _Emission:
    """A collector of the sources, values and scratch memory of launches while these are made."""

    kernels: tuple[Kernel, ...]
    orders: tuple[str, ...]  # the orders of addition for which launches are made
    sources: dict[str, Source] = field(default_factory=dict)
    observable: list[Observable] = field(default_factory=list)
    scratch: dict[str, Scratch] = field(default_factory=dict)
    begin: list[Launch] = field(default_factory=list)
    shared_prefixes: dict[str, SharedPrefixes] = field(default_factory=dict)
    numbers: dict[fx.Node, int] = field(default_factory=dict)

    def launches(self, values: Values, nodes: Sequence[fx.Node]) -> list[Launch]:
        """Return the launches of nodes: one or several for each node, and one for all nodes of a segment."""
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

    def add(self, call: Call) -> Launch:
        named = []
        for choice in call.choices:
            name = kernel_name(call.kernel, choice.source)
            self.sources[name] = choice.source
            named.append(Choice(name, choice.up_to))
        for each in map(self.add, call.begin):
            if each not in self.begin:
                self.begin.append(each)
        for name, each_size in call.scratch.items():
            size = msgspec.structs.replace(each_size, order=call.order or None)
            assert self.scratch.setdefault(name, size) == size, (
                f"{call.kernel}: {name} is {self.scratch[name]} elsewhere"
            )
        if call.only == SHARED and "cache_ptr" in call.arguments:
            constants = call.choices[0].source.constants
            members = int(constants["BLOCK_M"]) // int(constants["GROUP"])
            group = str(call.arguments["cache_ptr"].cache)
            if group in self.shared_prefixes:
                members = min(members, self.shared_prefixes[group].members)
            self.shared_prefixes[group] = SharedPrefixes(members, int(constants["UNIT"]))
        return Launch(
            node=call.kernel if call.node is None else name_of(call.node),
            layer=None if call.node is None else call.node.meta.get("layer"),
            rows=call.rows,
            only=call.only,
            order=call.order or None,
            choices=named,
            arguments=call.arguments,
            writes=[self._observed(value, operand) for value, operand in call.writes],
        )

    def engine_call(self, segment: Segment, values: Values) -> Launch:
        given = {**segment.inputs, **segment.outputs}
        sizes = {name: node.meta["val"].shape for name, node in given.items() if node.op != "get_attr"}
        kinds = row_kinds(values.program)
        return Launch(
            node=f"segment {segment.number}",
            layer=segment.layer,
            rows=segment.rows,
            engine=segment.engine,
            num_ops=len(segment.nodes),
            shapes={name: [kinds[str(first)], *map(int, rest)] for name, (first, *rest) in sizes.items()},
            arguments={name: _in_a_row(node, values) for name, node in given.items()},
            writes=[self._observed(node, values.operand(node)) for node in segment.outputs.values()],
        )

    def _observed(self, node: fx.Node, at: Operand) -> Written:
        """Return where a value lies, and its number among the observable ones."""
        if node not in self.numbers:
            self.numbers[node] = len(self.numbers)
            self.observable.append(observable(node, self.numbers[node]))
        return Written(self.numbers[node], at.pool, at.offset, at.column, at.stride)


def _in_a_row(node: fx.Node, values: Values) -> Where:
    """Return the place of an engine's input or output, after asserting that its rows are contiguous in memory."""
    if node.op == "get_attr":
        return Where(weight=str(node.target))
    if node.op == "placeholder":
        return Where(input=node.name)
    at = values.operand(node)
    assert at.stride == at.width and not at.column, f"{name_of(node)}: rows of {at.width} elements, {at.stride} apart"
    return Where(at.pool, offset=at.offset, column=0)


def kernel_name(kernel: str, source: Source) -> str:
    """Return the name of a specialised kernel, which is the same for the same choices."""
    facts = [source.signature, source.constants, source.grid, source.num_warps, source.num_stages, source.aligned]
    return f"{kernel}-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:DIGEST_LENGTH]}"
