"""The generator of TensorRT plans for segments of a paged program: one plan for all that differ only in weights.

A plan takes its weights as inputs, so layers share it, inferc's own kernels read the same copy, and the plan itself is
small. In return TensorRT cannot optimize for known weights, such as by another layout of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from inferc.codegen.kernel import Kernel
from inferc.codegen.segments import VIEWS, Segment, segments_of
from inferc.codegen.select import chosen_kernel
from inferc.codegen.tensorrt.adapter import Building, Library, Shapes
from inferc.codegen.tensorrt.emit import ALIASES
from inferc.codegen.tensorrt.network import Tensor, TensorRTNetwork
from inferc.codegen.tensorrt.table import KERNELS
from inferc.codegen.values import outputs
from inferc.ir.program import Program, target_name
from inferc.manifest_types import PlanProfile

MAX_TOKENS = 8192  # tokens of a call
USUAL_DECODE, MAX_DECODE, USUAL_PREFILL = 16, 256, 512


@dataclass(frozen=True)
class Profile:
    """A range of calls that begins at one row: the usual number of rows, and the largest."""

    name: str
    usual: int
    most: int

    def shapes(self, segment: Segment) -> Shapes:
        """Return the least, usual and largest shape of every input; shapes of weights do not depend on the step."""

        def shape(node: fx.Node, rows: int) -> list[int]:
            return [size if isinstance(size, int) else rows for size in node.meta["val"].shape]

        return {
            name: (shape(node, 1), shape(node, self.usual), shape(node, self.most))
            for name, node in segment.inputs.items()
        }

    @property
    def stored(self) -> PlanProfile:
        """The profile as the manifest has it."""
        return PlanProfile(name=self.name, max_num_tokens=self.most, max_num_rows=self.most)


PROFILES = (Profile("decode", USUAL_DECODE, MAX_DECODE), Profile("prefill", USUAL_PREFILL, MAX_TOKENS))
"""The profiles in the order in which plans have them."""


@dataclass(frozen=True)
class SegmentPlan:
    """A serialized engine.

    calls: how often a step runs it; layers: the network that it was built from, for people to read.
    """

    name: str
    data: Any  # a buffer
    calls: int
    layers: list[dict[str, Any]]


def plans(program: Program, library: Library, arch: str, kernels: Sequence[Kernel] = KERNELS) -> Iterator[SegmentPlan]:
    """Yield the plans of a program, each built when it is asked for.

    Raises UnsupportedError, in one line, for what TensorRT does not build.
    """
    segments, hidden = segments_of(program), outputs(program)[0]
    in_16_bits = hidden.meta["val"].dtype != torch.float32  # products of 16-bit models lose nothing by TF32
    for segment in first_of_each(segments):
        building = Building.begin(library, arch)
        build(program, segment, building, kernels)
        data = building.plan([each.shapes(segment) for each in PROFILES], tf32=in_16_bits)
        calls = sum(each.engine == segment.engine for each in segments)
        yield SegmentPlan(segment.engine, data, calls, building.layers())


def first_of_each(segments: Sequence[Segment]) -> list[Segment]:
    """Return the first segment of each engine."""
    found: dict[str, Segment] = {}
    for segment in segments:
        found.setdefault(segment.engine, segment)
    return list(found.values())


def build(
    program: Program, segment: Segment, building: Building, kernels: Sequence[Kernel] = KERNELS
) -> TensorRTNetwork:
    """Write every node of the segment as TensorRT layers, between its inputs and its outputs."""
    net = TensorRTNetwork(building, program, {}, 0)
    for name, node in segment.inputs.items():
        value = node.meta["val"]
        shape = tuple(size if isinstance(size, int) else -1 for size in value.shape)
        net.give(node, building.network.add_input(net.unique(name), net.dtype(value.dtype), shape))
    for node in segment.nodes:
        for read in node.all_input_nodes:
            _make_view(net, read)
        call = ALIASES.get(target_name(node.target))
        net.emit(node, call or chosen_kernel(node, "tensorrt", tuple(kernels)).load_emit())
    for name, node in segment.outputs.items():
        net.output(_of_its_own(net, node), name)
    return net


def _make_view(net: TensorRTNetwork, node: fx.Node) -> None:
    """Add a view that the segment reads, of a value that the network has."""
    if node.op == "call_function" and node.target in VIEWS and not net.has(node):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        _make_view(net, source)
        net.emit(node, ALIASES[target_name(node.target)])


def _of_its_own(net: TensorRTNetwork, node: fx.Node) -> Tensor:
    """Return the node's value as a tensor of its own: a call may return one of its inputs unchanged."""
    value = net.value(node)
    if value.is_network_input or value.is_network_output:
        return net.add("identity", value, name=f"{node.name}.identity")
    return value
