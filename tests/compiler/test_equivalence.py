"""The check that a lowered program is the model sees faults planted in one layer, in every dtype and scheme."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import make_random_model
from torch import fx

from inferc.backends.lower import LowerConfig
from inferc.backends.partition import Ranks, lower_ranks
from inferc.compiler.certificate import Certificate, Row
from inferc.compiler.equivalence import ProgramCheck
from inferc.errors import VerifyError
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


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Checkpoint, Program]]:
    root = tmp_path_factory.mktemp("models")

    @cache
    def made(family: str, dtype: str) -> tuple[Checkpoint, Program]:
        folder: Path = make_random_model(family, root / f"{family}-{dtype}", dtype, num_hidden_layers=LAYERS)
        checkpoint = load(folder)
        return checkpoint, capture(checkpoint, dtype, LENGTH, check=False)

    return made


def checked(made: tuple[Checkpoint, Program], edit: Edit | None, allow_drift: bool = True, **how: Any) -> list[Row]:
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


def attention_scale(program: Program) -> None:
    (node,) = of_layer(program, inferc.attention.default)
    with_argument(node, 4, float(node.args[4]) * 1.001)  # type: ignore[arg-type]


def another_eps(program: Program) -> None:
    node = of_layer(program, inferc.rms_norm.default)[0]
    with_argument(node, 2, float(node.args[2]) * 2)  # type: ignore[arg-type]


def another_eps_of_heads(program: Program) -> None:
    node = next(each for each in of_layer(program, inferc.rms_norm.default) if each.meta["val"].dim() == 3)
    with_argument(node, 2, float(node.args[2]) * 2)  # type: ignore[arg-type]


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
    "attention scale": ("qwen3", attention_scale),
    "eps": ("qwen3", another_eps),
    "eps of heads": ("qwen3", another_eps_of_heads),
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
QUICK = {  # the cases of `make test`
    ("q x 1.0001", "bfloat16"),
    ("eps of heads", "bfloat16"),
    ("window", "float32"),
    ("sign of a rope", "w8a8"),
    ("dropped bias", "int4"),
    ("swapped experts", "int8"),
}
CASES = [
    pytest.param(fault, how, id=f"{fault}-{how}", marks=[] if (fault, how) in QUICK else pytest.mark.slow)
    for how in HOW
    for fault in FAULTS
]


@pytest.mark.parametrize(("fault", "how"), CASES)
def test_a_planted_fault_is_seen(models: Any, fault: str, how: str) -> None:
    family, edit = FAULTS[fault]
    rows = checked(models(family, "float32" if how == "float32" else "bfloat16"), edit, **HOW[how])
    refused = [row for row in rows if not row.ok]
    assert refused and all("planted is the first that is off" in row.reason for row in refused), rows


@pytest.mark.quick("qwen3-bfloat16", "mixtral-int8")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mixtral"])
def test_a_right_program_passes(models: Any, family: str, how: str) -> None:
    rows = checked(models(family, "float32" if how == "float32" else "bfloat16"), None, **HOW[how])
    assert [row.name for row in rows] == ["program", "program_random", "captured_far", "program_small"]
    assert all(row.ok and row.relative_error is not None and row.relative_error < 3e-6 for row in rows), rows


def test_a_fault_is_refused_by_the_name_of_its_pass(models: Any) -> None:
    with pytest.raises(
        VerifyError, match=r"program \(run by reference\): its logits are off by .* planted is the first"
    ):
        checked(models("qwen2", "bfloat16"), scaled_by(1.01, 0), allow_drift=False)
