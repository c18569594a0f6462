"""The generator of one TensorRT plan from a lowered Program over a dense KV cache: the whole step, with its weights.

A plan is built for ranges of shapes, its profiles: `decode` for sequences of one new token each, and `prefill` for one
sequence of several. The runtime cuts larger steps into calls that fit.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx

from inferc.codegen.kernel import Kernel
from inferc.codegen.select import chosen_kernel, needs_kernel
from inferc.codegen.tensorrt.adapter import Building, Library, Shapes
from inferc.codegen.tensorrt.calls import elementwise
from inferc.codegen.tensorrt.network import Bytes, TensorRTNetwork
from inferc.codegen.tensorrt.table import KERNELS
from inferc.codegen.values import outputs
from inferc.ir.program import Program, target_name
from inferc.manifest_types import PlanProfile, StoredWeight, Tensorrt

ALIASES = {"aten.slice.Tensor": elementwise.slice_, "aten.view": elementwise.view, "getitem": elementwise.part}
CACHE_RANK = 4
MAX_SEQS = 256  # sequences of a decode call
MAX_TOKENS = 512  # tokens of a prefill call
MAX_ROWS = 256  # rows of either call whose logits are asked for
USUAL_SEQS, USUAL_TOKENS = 16, 256  # the sizes that TensorRT chooses its kernels for


@dataclass(frozen=True)
class Profile:
    """A range of calls that begins at one sequence, token and row.

    seqs, tokens and rows: the usual number, and the largest.
    """

    name: str
    seqs: tuple[int, int]
    tokens: tuple[int, int]
    rows: tuple[int, int]

    def shapes(self, program: Program, capacity: int) -> Shapes:
        """Return the least, usual and largest shape of every input."""
        first_axis = {"token_ids": self.tokens, "positions": self.tokens, "logits_rows": self.rows}

        def shape(node: fx.Node, place: int | None) -> list[int]:
            usual_and_most = first_axis.get(node.name, self.seqs)
            sizes = [size if isinstance(size, int) else -1 for size in node.meta["val"].shape]
            sizes[0] = 1 if place is None else usual_and_most[place]
            return [sizes[0], sizes[1], capacity, sizes[3]] if len(sizes) == CACHE_RANK else sizes

        return {node.name: (shape(node, None), shape(node, 0), shape(node, 1)) for node in program.inputs()}

    @property
    def stored(self) -> PlanProfile:
        """The profile as the manifest has it."""
        return PlanProfile(
            name=self.name, max_num_seqs=self.seqs[1], max_num_tokens=self.tokens[1], max_num_rows=self.rows[1]
        )


def profiles_for(max_model_len: int) -> tuple[Profile, ...]:
    """Return the profiles in the order in which the plan has them."""
    most = min(MAX_TOKENS, max_model_len)
    seqs, tokens = (USUAL_SEQS, MAX_SEQS), (min(USUAL_TOKENS, most), most)
    return (
        Profile("decode", seqs, seqs, (USUAL_SEQS, MAX_ROWS)),
        Profile("prefill", (1, 1), tokens, (1, min(MAX_ROWS, most))),
    )


@dataclass(frozen=True)
class Plan:
    """A serialized engine, with the layers of its network for people to read."""

    data: Any  # a buffer
    layers: list[dict[str, Any]]
    facts: Tensorrt


def emit(
    program: Program,
    weights: Mapping[str, StoredWeight],
    folder: Path,
    library: Library,
    arch: str,
    kernels: Sequence[Kernel] = KERNELS,
) -> Plan:
    """Build the plan; `weights` are by the program's names, and lie in files of `folder`.

    Raises UnsupportedError, in one line, for what TensorRT does not build.
    """
    building = Building.begin(library, arch)
    net = build(program, read_weights(weights, folder), building, kernels)
    hidden, logits = outputs(program)
    assert logits is not None, "the ranks of a pipeline are not exported"
    results = {"hidden": hidden, "logits": logits}
    for name, node in results.items():
        net.output(net.add("cast", net.value(node), net.dtype(torch.float32), name=f"output.{name}"), name)
    for node in program.graph.nodes:
        if node.op == "call_function" and target_name(node.target) == "inferc.dense_write":
            net.output(net.value(node), f"{node.args[0].name}.out")
    profiles = profiles_for(program.block_size)
    is_float32 = hidden.meta["val"].dtype == torch.float32
    data = building.plan([each.shapes(program, program.block_size) for each in profiles], tf32=not is_float32)
    facts = Tensorrt(library.package, library.version, arch, [each.stored for each in profiles])
    return Plan(data, building.layers(), facts)


def build(
    program: Program, weights: Mapping[str, Bytes], building: Building, kernels: Sequence[Kernel] = KERNELS
) -> TensorRTNetwork:
    """Write every node of the program as TensorRT layers."""
    net = TensorRTNetwork(building, program, weights, program.block_size)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            net.input(node)
        elif node.op == "call_function":
            call = ALIASES.get(target_name(node.target))
            if needs_kernel(node):
                call = chosen_kernel(node, "tensorrt", tuple(kernels)).load_emit()
            assert call is not None
            net.emit(node, call)
    return net


def read_weights(weights: Mapping[str, StoredWeight], folder: Path) -> dict[str, Bytes]:
    """Return the weights in mapped memory, which the builder reads them from."""
    maps: dict[str, mmap.mmap] = {}
    for file in {weight.file for weight in weights.values()}:
        with (folder / file).open("rb") as opened:
            maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    found = {}
    for name, weight in weights.items():
        assert not weight.layout, f"{name} is packed for another target"
        data = np.frombuffer(maps[weight.file], np.uint8, weight.num_bytes, weight.offset)
        found[name] = Bytes(weight.dtype, weight.shape, data)
    return found
