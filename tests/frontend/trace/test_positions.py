"""A compiled model counts positions as its class does where nobody gives it any."""

from pathlib import Path
from typing import Any

import pytest
import torch
from odd_models import config_of, make_odd_model

from inferc.errors import ExportError
from inferc.frontend import check
from inferc.frontend.capture import capture
from inferc.frontend.export import context_length
from inferc.frontend.trace.positions import first_position
from inferc.ir.program import Program


@pytest.mark.parametrize(
    ("model_type", "padding", "first"),
    [("roberta", 2, 3), ("camembert", 1, 2), ("bert", 2, 0), ("llama", 2, 0), ("roberta", None, 0)],
)
def test_the_first_position_is_the_classes_own(model_type: str, padding: int | None, first: int) -> None:
    config = config_of(model_type)
    config.pad_token_id = padding
    assert first_position(config) == first
    assert context_length(config).trained == 128 - first


@pytest.mark.slow
def test_a_table_of_positions_loses_the_rows_in_front(tmp_path: Path) -> None:
    program: Program = capture(make_odd_model("roberta", tmp_path / "m", num_hidden_layers=1), "float32")
    assert program.info.max_model_len == 125
    added = program.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor, sort=True)
    assert added[0].args == (program.input("positions"), 3)


@pytest.mark.slow
def test_positions_that_are_not_the_models_own_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def later(config: Any) -> int:
        return 4

    folder = make_odd_model("bert", tmp_path / "m", num_hidden_layers=1)
    monkeypatch.setattr(check, "first_position", later)
    monkeypatch.setattr(check, "LAST_POSITION", 64)  # its table has a row for each then
    with pytest.raises(ExportError, match="with position_ids from 4 on the model gives other logits than with none"):
        capture(folder, "float32")


@pytest.mark.slow
def test_a_parameter_that_is_a_single_number_is_a_weight_of_one_element(tmp_path: Path) -> None:
    program = capture(make_odd_model("apertus", tmp_path / "m", num_hidden_layers=1), "float32")
    weight = program.weights["layers.0.mlp.act_fn.beta"]
    assert (weight.shape, weight.dtype) == ((1,), torch.float32)
