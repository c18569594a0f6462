"""Small programs as TensorRT networks: built for an absent chip, and computed on the CPU beside their references."""

from __future__ import annotations

from pathlib import Path

import torch
from graphs import Example
from kernel_tables import choose_for
from onnx_runs import write_weights
from tensorrt_network import Evaluated
from torch import Tensor, fx

from inferc.codegen.tensorrt.adapter import Building, to_build
from inferc.codegen.tensorrt.emit import build, read_weights
from inferc.targets import Target

TENSORRT = Target.parse("tensorrt:sm_86")
MOST = 64  # of a dynamic axis, for which a plan is built


def run_tensorrt(made: Example, folder: Path, target: Target = TENSORRT, *, with_plan: bool = True) -> list[Tensor]:
    """Return what the example's network computes, after TensorRT built it."""
    program, (arch,) = made.program, target.archs
    choose_for(target)(program)
    building = Building.begin(to_build(arch, None), arch)
    weights = read_weights(write_weights(program, made.reader, folder), folder)
    net = build(program, weights, building)
    results: tuple[fx.Node, ...] = program.output().args[0]  # type: ignore[assignment]
    for index, node in enumerate(results):
        net.output(net.add("identity", net.value(node), name=f"output.{index}"), f"out{index}")
    for node in program.graph.nodes:
        if node.target == torch.ops.inferc.dense_write.default:
            net.output(net.value(node), f"{node.args[0].name}.out")
    if with_plan:
        shapes = {}
        for name, value in made.inputs.items():
            dims = next(node.meta["val"].shape for node in program.inputs() if node.name == name)
            dynamic = [not isinstance(size, int) for size in dims]
            ranges = [
                [most if is_dynamic else size for is_dynamic, size in zip(dynamic, value.shape, strict=True)]
                for most in (1, 5, MOST)
            ]
            shapes[name] = (ranges[0], ranges[1], ranges[2])
        assert len(memoryview(building.plan([shapes], tf32=False)).cast("B")) > 0
    found = Evaluated(net.network, weights)(made.inputs)
    return [*found.values()]
