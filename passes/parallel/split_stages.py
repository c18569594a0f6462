"""Cut a program between layers into pipeline stages, each a program of its own.

One value crosses each cut, the hidden rows: a later stage takes them as `hidden_in`, and all stages but the last return
them. Values that depend on positions alone (rope tables) are computed in every stage that reads them. Stages are
balanced by the bytes of their weights.
"""

from __future__ import annotations

from msgspec.structs import replace

from inferc.errors import UnsupportedError
from inferc.ir import program as program_lib
from inferc.ir.layer_borders import Stage, crossing, layer_of, layers_of_calls
from inferc.ir.program import Program


def split_stages(program: Program, pp: int) -> list[Program]:
    """Return the programs of `pp` stages in order; `program` stays as it is.

    Raises UnsupportedError for more stages than layers, or if more than the hidden rows crosses a cut.
    """
    if pp == 1:
        return [program]
    first_layers = balance(layer_bytes(program), pp)
    made = []
    for stage in range(pp):
        own = program_lib.from_json(program_lib.to_json(program))
        _keep(own, _stages(own, first_layers), stage, pp)
        made.append(own)
    return made


def layer_bytes(program: Program) -> list[int]:
    """Return the bytes of each layer's weights.

    Weights in front of the layers count with the first layer, those behind the layers with the last.
    """
    num_layers = 1 + max((layer_of(node) for node in program.graph.nodes), default=-1)
    sizes = [0] * max(num_layers, 1)
    of = layers_of_calls(program)
    seen: set[tuple[str, int]] = set()
    for node in program.graph.nodes:
        if node.op == "get_attr":
            for user in node.users:
                at = (str(node.target), of.get(user, 0))
                if at not in seen:
                    seen.add(at)
                    sizes[at[1]] += program.weight(node).num_bytes
    return sizes


def balance(sizes: list[int], parts: int) -> list[int]:
    """Return the first layer of each part, such that the largest part is as small as possible."""
    if parts > len(sizes):
        raise UnsupportedError(f"--pp {parts}: the model has {len(sizes)} layers; use --pp {len(sizes)} or fewer")
    total = [0]
    for size in sizes:
        total.append(total[-1] + size)
    best: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {(0, 0): (0, ())}
    for part in range(1, parts + 1):
        for end in range(part, len(sizes) + 1):
            options = [
                (max(best[part - 1, start][0], total[end] - total[start]), (*best[part - 1, start][1], start))
                for start in range(part - 1, end)
                if (part - 1, start) in best
            ]
            if options:
                best[part, end] = min(options)
    return list(best[parts, len(sizes)][1])


def _stages(program: Program, first_layers: list[int]) -> Stage:
    return {node: sum(layer >= first for first in first_layers) - 1 for node, layer in layers_of_calls(program).items()}


def _keep(program: Program, stages: Stage, stage: int, pp: int) -> None:
    """Reduce `program` to that of one stage."""
    entering = crossing(stages, stage, f"--pp: stage {stage}") if stage else None
    leaving = crossing(stages, stage + 1, f"--pp: stage {stage + 1}") if stage + 1 < pp else None
    if entering is not None:
        last_input = program.inputs()[-1]
        with program.graph.inserting_after(last_input):
            hidden = program.graph.placeholder("hidden_in")
        hidden.meta.update(val=entering.meta["val"], name="hidden_in", layer=None)
        entering.replace_all_uses_with(hidden)
        if leaving is entering:
            leaving = hidden
    output = program.output()
    if leaving is not None:
        output.args = ((leaving,),)
        output.meta["val"] = (leaving.meta["val"],)
        program.info = replace(program.info, hidden_out=True)
    program.drop_unused()
    program.info = replace(program.info, pp_stage=stage, pp_size=pp)
