"""The check that a lowered program is the model sees faults planted in one layer, in every dtype and scheme."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from planted_faults import FAULTS, HOW, captured_models, checked, scaled_by

from inferc.errors import VerifyError
from inferc.frontend.checkpoint.load import Checkpoint
from inferc.ir.program import Program


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Checkpoint, Program]]:
    return captured_models(tmp_path_factory.mktemp("models"))


QUICK = {  # the cases of `make test`
    ("q x 1.0001", "bfloat16"),
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
