"""Faults planted in one layer of a model, and the check that must see them: for tests, and for the table of its limits.

Run it to print, for each fault that has a size (or those that are named), the smallest that the check sees and the
largest that it does not.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from random_models import make_random_model
from torch import fx

from inferc.backends.lower import LowerConfig
from inferc.backends.partition import Ranks, lower_ranks
from inferc.compiler.certificate import Certificate, Row
from inferc.compiler.equivalence import ProgramCheck
from inferc.frontend.capture import capture
from inferc.frontend.checkpoint.load import Checkpoint, load
from inferc.ir import program as program_lib
from inferc.ir import weights as weight_lib
from inferc.ir.program import Program
from inferc.passes.user_passes import UserPass
from inferc.system.progress import silent
from inferc.targets import Target

aten, inferc = torch.ops.aten, torch.ops.inferc
LAYERS, FAULTY = 6, 4  # the first four layers hold all kinds of a model without the fault
LENGTH = 128
Edit = Callable[[Program], None]
Captured = tuple[Checkpoint, Program]


def captured_models(root: Path) -> Callable[[str, str], Captured]:
    """Return a function that makes a random model of a family in a dtype, and captures it, once."""

    @cache
    def made(family: str, dtype: str) -> Captured:
        folder: Path = make_random_model(family, root / f"{family}-{dtype}", dtype, num_hidden_layers=LAYERS)
        checkpoint = load(folder)
        return checkpoint, capture(checkpoint, dtype, LENGTH, check=False)

    return made


def checked(made: Captured, edit: Edit | None, allow_drift: bool = True, **how: Any) -> list[Row]:
    """Lower the model with `edit` as one of the passes, and return the rows of the check."""
    checkpoint, captured = made

    def run(program: Program) -> int:
        assert edit is not None
        if program.info.num_attention_layers > FAULTY:  # in a model that is too short there is no such layer
            edit(program)
        return 1

    planted = (UserPass("planted", "planted", run, "fuse_moe_routing"),) if edit else ()
    config = LowerConfig(Target.parse("cpu"), passes=planted, **how)
    program = program_lib.copy(captured)
    lowered = lower_ranks(program, config, Ranks())
    certificate = Certificate("", [])
    ProgramCheck(checkpoint, captured, lowered, config, Ranks(), LENGTH).run(certificate, allow_drift, silent)
    return certificate.rows


def of_layer(program: Program, *targets: Any) -> list[fx.Node]:
    return [node for node in program.graph.nodes if node.meta.get("layer") == FAULTY and node.target in targets]


def with_argument(node: fx.Node, index: int, value: Any) -> None:
    node.args = tuple(value if at == index else each for at, each in enumerate(node.args))


def scaled_by(factor: float, which: int) -> Edit:
    """Scale the weight of a projection: 0 to 2 are q, k and v, 3 is o, 4 to 6 are gate, up and down."""

    def edit(program: Program) -> None:
        weight = str(of_layer(program, aten.linear.default)[which].args[1].target)  # type: ignore[union-attr]
        before = program.weights[weight]
        program.weights[weight] = weight_lib.elementwise((before,), f"x0 * {factor}", before.dtype)

    return edit


def attention_scaled_by(factor: float) -> Edit:
    def edit(program: Program) -> None:
        (node,) = of_layer(program, inferc.attention.default)
        with_argument(node, 4, float(node.args[4]) * factor)  # type: ignore[arg-type]

    return edit


def eps_scaled_by(factor: float, dims: int) -> Edit:
    """Scale the epsilon of the layer's first norm over values with so many axes: 2 for rows, 3 for heads."""

    def edit(program: Program) -> None:
        node = next(each for each in of_layer(program, inferc.rms_norm.default) if each.meta["val"].dim() == dims)
        with_argument(node, 2, float(node.args[2]) * factor)  # type: ignore[arg-type]

    return edit


def window(program: Program) -> None:
    (node,) = of_layer(program, inferc.attention.default)
    with_argument(node, 5, "sliding")
    with_argument(node, 6, 64)


def sign_of_a_rope(program: Program) -> None:
    """Turn the keys of a layer the other way: by a table whose second half, the sines, has the other sign."""
    rope = of_layer(program, inferc.rope.default)[1]
    table = rope.args[1]
    assert isinstance(table, fx.Node)
    value = table.meta["val"]
    half = int(value.shape[-1]) // 2
    signs = weight_lib.constant(torch.cat((torch.ones(half), -torch.ones(half))).to(value.dtype))
    sign = program.add_weight("signs", signs, rope)
    with program.graph.inserting_before(rope):
        turned = program.graph.call_function(aten.mul.Tensor, (table, sign))
    turned.meta.update(val=value, name="turned", layer=FAULTY)
    with_argument(rope, 1, turned)


def dropped_bias(program: Program) -> None:
    node = of_layer(program, aten.linear.default)[2]
    assert len(node.args) == 3
    node.args = node.args[:2]


def swapped_experts(program: Program) -> None:
    (node,) = of_layer(program, inferc.moe_experts.default)
    name = str(node.args[4].target)  # type: ignore[union-attr]
    down = program.weights[name]
    order = [0, 2, 1, *range(3, down.shape[0])]
    program.weights[name] = weight_lib.concat(tuple(weight_lib.slice_(down, 0, at, at + 1) for at in order))


FAULTS: dict[str, tuple[str, Edit]] = {
    "q x 1.0001": ("qwen2", scaled_by(1.0001, 0)),
    "k x 1.0001": ("qwen2", scaled_by(1.0001, 1)),
    "v x 1.0001": ("qwen2", scaled_by(1.0001, 2)),
    "o x 1.0001": ("qwen2", scaled_by(1.0001, 3)),
    "down x 1.0001": ("qwen2", scaled_by(1.0001, 6)),
    "attention scale": ("qwen3", attention_scaled_by(1.001)),
    "eps": ("qwen3", eps_scaled_by(2, 2)),
    "eps of heads": ("qwen3", eps_scaled_by(2, 3)),
    "window": ("qwen2", window),
    "sign of a rope": ("qwen2", sign_of_a_rope),
    "dropped bias": ("qwen2", dropped_bias),
    "swapped experts": ("mixtral", swapped_experts),
}
HOW: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {},
    "int8": {"quantize": "int8", "kv_dtype": "int8"},
    "w8a8": {"quantize": "w8a8"},
    "int4": {"quantize": "int4"},
}


# ------------------------------------------------------------------------------------- the table of limits

FACTORS = (1.01, 1.001, 1.0003, 1.0001, 1.00003, 1.00001, 1.000003)
EPS_FACTORS = (10.0, 3.0, 2.0, 1.3, 1.1, 1.03, 1.01, 1.003, 1.001, 1.0003, 1.0001)
SIZED: dict[str, tuple[str, Callable[[float], Edit], tuple[float, ...]]] = {
    "q scaled": ("qwen2", partial(scaled_by, which=0), FACTORS),
    "k scaled": ("qwen2", partial(scaled_by, which=1), FACTORS),
    "v scaled": ("qwen2", partial(scaled_by, which=2), FACTORS),
    "o scaled": ("qwen2", partial(scaled_by, which=3), FACTORS),
    "down scaled": ("qwen2", partial(scaled_by, which=6), FACTORS),
    "attention's scale": ("qwen3", attention_scaled_by, FACTORS),
    "eps of a norm": ("qwen3", partial(eps_scaled_by, dims=2), EPS_FACTORS),
    "eps of a norm of heads": ("qwen3", partial(eps_scaled_by, dims=3), EPS_FACTORS),
}


def limits(
    made: Callable[[str, str], Captured], faults: Iterable[str] = SIZED
) -> Iterator[tuple[str, str, float | None, float | None]]:
    """Yield for each fault and scheme the smallest factor that is seen, and the next one, which is not."""
    for fault in faults:
        family, edit, factors = SIZED[fault]
        for how in ("float32", "bfloat16", "int8"):
            model = made(family, "float32" if how == "float32" else "bfloat16")
            seen = unseen = None
            for factor in factors:
                if all(row.ok for row in checked(model, edit(factor), **HOW[how])):
                    unseen = factor
                    break
                seen = factor
            yield fault, how, seen, unseen


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        print("| fault in one layer | artifact | smallest seen | not seen |\n|---|---|---|---|")
        for fault, how, seen, unseen in limits(captured_models(Path(scratch)), sys.argv[1:] or SIZED):
            print(f"| {fault} | {how} | x {seen} | {f'x {unseen}' if unseen else 'none tried'} |", flush=True)
