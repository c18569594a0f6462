"""Choose the kernel of each node, and store weights in the layouts that the chosen kernels read.

Selection reads dtypes, shapes and the target only. The kernel's name goes into `meta["kernel"]` and, with the program,
into the artifact: only the instruction set is chosen at serving time.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from inferc.codegen.kernel import Kernel
from inferc.codegen.segments import segment_of
from inferc.codegen.select import needs_kernel, select
from inferc.errors import UnsupportedError
from inferc.ir import weights as weight_lib
from inferc.ir.program import Program, argument
from inferc.targets import Target


@dataclass(frozen=True)
class ChooseKernels:
    """A pass that chooses for each node the first of `kernels` that runs it.

    Within a segment, which a TensorRT engine computes, it is the first of `in_segments`.
    """

    target: Target
    kernels: tuple[Kernel, ...]  # in order of preference
    in_segments: tuple[Kernel, ...] = ()
    name: str = "choose_kernels"

    def __call__(self, program: Program) -> int:
        chosen = self._choose(program)
        wanted: dict[str, str | None] = {}
        for node, kernel in chosen.items():
            _collect_layouts(node, kernel, wanted)
        for name, layout in wanted.items():
            weight = program.weights[name]
            if layout is not None and weight.op != "pack":
                program.weights[name] = weight_lib.pack(weight, layout)
        changed = sum(node.meta.get("kernel") != kernel.name for node, kernel in chosen.items())
        for node, kernel in chosen.items():
            node.meta["kernel"] = kernel.name
        return changed

    def _choose(self, program: Program) -> dict[fx.Node, Kernel]:
        """Select a kernel for each node.

        Raises UnsupportedError with everything that cannot run, each kind of node once.
        """
        chosen: dict[fx.Node, Kernel] = {}
        # The refusals of the nodes, by op and result type.
        refused: dict[str, list[str]] = {}
        for node in filter(needs_kernel, program.graph.nodes):
            try:
                kernels = self.kernels if segment_of(node) is None else self.in_segments
                chosen[node] = select(node, self.target, kernels)
            except UnsupportedError as error:
                refused.setdefault(f"{node.target} {node.meta.get('val')}", []).append(str(error))
        if refused:
            raise UnsupportedError("; ".join(map(_of_nodes, refused.values())))
        return chosen


def _of_nodes(errors: list[str]) -> str:
    return errors[0] if len(errors) == 1 else f"{errors[0]}, and {len(errors) - 1} more like it"


def _collect_layouts(node: fx.Node, kernel: Kernel, wanted: dict[str, str | None]) -> None:
    """Record the layout of each weight that `kernel` reads; all readers must agree, because a weight is stored once."""
    for name, layout in kernel.weight_layouts.items():
        reader = argument(node, name)
        if not isinstance(reader, fx.Node) or reader.op != "get_attr":
            continue
        weight = str(reader.target)
        if wanted.setdefault(weight, layout) != layout:
            raise UnsupportedError(
                f"{node.meta.get('name', node.name)}: kernel {kernel.name} reads {weight} as {layout or 'row-major'},"
                f" another kernel as {wanted[weight] or 'row-major'}; a weight is stored once"
            )
