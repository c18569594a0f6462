"""Programs of segments: each segment is computed by its network, layer by layer on the CPU, the rest by references."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import tensorrt_network
import torch
from tensorrt_network import Evaluated
from torch import Tensor, fx

from inferc.codegen.segments import VIEWS, Segment, segment_of, segments_of
from inferc.codegen.tensorrt.adapter import Building, to_build
from inferc.codegen.tensorrt.segments import PROFILES, build, first_of_each
from inferc.ir.ops import quantize
from inferc.ir.program import Program
from inferc.ir.reference import IN_PLACE


def networks(program: Program, arch: str = "sm_86", *, with_plans: bool = True) -> dict[str, Evaluated]:
    """Return networks by engine; with_plans: TensorRT builds each too."""
    made = {}
    for segment in first_of_each(segments_of(program)):
        building = Building.begin(to_build(arch, None), arch)
        net = build(program, segment, building)
        if with_plans:
            data = building.plan([profile.shapes(segment) for profile in PROFILES], tf32=False)
            assert len(memoryview(data).cast("B")) > 0
        made[segment.engine] = Evaluated(net.network, {})
    return made


def run_segments(
    program: Program,
    made: Mapping[str, Evaluated],
    inputs: dict[str, Tensor],
    read_weight: Callable[[str], Tensor],
) -> tuple[Tensor, Tensor]:
    """(hidden, logits) of a step. Values that stay inside of a segment are never there."""
    values: dict[fx.Node, Any] = {}
    ends: dict[fx.Node, Segment] = {segment.nodes[-1]: segment for segment in segments_of(program)}

    def value(node: fx.Node) -> Any:
        if node.op == "placeholder":
            return inputs[node.name]
        if node.op == "get_attr":
            return read_weight(str(node.target))
        return call(node) if node.target in VIEWS else values[node]

    def call(node: fx.Node) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), value)
        return IN_PLACE.get(node.target, node.target)(*args, **kwargs)  # type: ignore[operator]

    with torch.inference_mode():
        for node in program.graph.nodes:
            if node in ends:
                segment = ends[node]
                found = made[segment.engine]({name: value(each) for name, each in segment.inputs.items()})
                values.update({each: found[name] for name, each in segment.outputs.items()})
            elif node.op == "call_function" and segment_of(node) is None and node.target not in VIEWS:
                values[node] = call(node)
        hidden, logits = map(value, program.output().args[0])  # type: ignore[arg-type]
    return hidden, logits


class Roundings:
    """The roundings in a run by the references, which a run by networks compares with and goes on from.

    Sums that differ in their last bits may fall to different sides of a tie, which then is a difference of a whole
    step, in all that follows it. So the numbers are compared before they are rounded.
    """

    def __init__(self) -> None:
        self._rows: list[Tensor] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Around the references' run."""
        within = quantize._within

        def kept(x: Tensor, largest: float) -> tuple[Tensor, Tensor]:
            rows, scale = within(x, largest)
            self._rows.append(rows.clone())  # they are rounded in place
            return rows, scale

        with mock.patch.object(quantize, "_within", kept):
            yield

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Around the networks' run, in which as much is rounded, in the same order."""
        within, rounded, rows = quantize._within, tensorrt_network.rounded, iter(self._rows)

        def by_references(x: Tensor, largest: float) -> tuple[Tensor, Tensor]:
            found, scale = within(x, largest)
            return _as_before(found, next(rows)), scale

        def by_networks(value: Tensor, dtype: torch.dtype) -> Tensor:
            return rounded(_as_before(value, next(rows)), dtype)

        with (
            mock.patch.object(quantize, "_within", by_references),
            mock.patch.object(tensorrt_network, "rounded", by_networks),
        ):
            yield
        assert next(rows, None) is None, "less was rounded than by the references"


def _as_before(found: Tensor, expected: Tensor) -> Tensor:
    torch.testing.assert_close(found, expected, rtol=0.0, atol=float(1e-5 * expected.abs().max()))
    return expected
