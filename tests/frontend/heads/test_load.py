"""The loading of heads: their two published forms, and what is no head of a model, which is told in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_heads import HeadOracle, make_head
from random_models import make_random_model
from safetensors.torch import load_file, save_file

from inferc.errors import InfercError
from inferc.frontend.checkpoint.bind import bind
from inferc.frontend.heads.load import load_head
from inferc.frontend.trace import torch_export as trace
from inferc.ir import weights as weight_lib

LAYERS = (1, 2, 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model("llama", tmp_path_factory.mktemp("model") / "model", num_hidden_layers=5)


@pytest.mark.parametrize("form", ["speculators", "eagle"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"norm_before_fc": True, "norm_before_residual": True}, {"norm_output": True, "norm_before_residual": False}],
    ids=str,
)
def test_both_forms_compute_what_the_description_says(
    model: Path, tmp_path: Path, form: str, fields: dict[str, Any]
) -> None:
    folder = make_head(tmp_path / "head", model, form=form, num_drafted=100, layers=LAYERS, **fields)
    found = load_head(folder, model)
    head = trace.build(found.model_class, found.config, torch.float32, "cpu")
    binding = bind(trace.build(found.model_class, found.config, torch.float32, "meta"), found)
    head.load_state_dict({name: weight_lib.read_whole(each, found.reader) for name, each in binding.weights.items()})
    oracle = HeadOracle.of(folder, load_file(model / "model.safetensors")["model.embed_tokens.weight"])
    tokens, random = [3, 1, 4, 1, 5, 9, 2, 6], torch.Generator().manual_seed(2)
    given, own = torch.randn(5, 3 * 64, generator=random), torch.randn(3, 64, generator=random)
    rows = torch.zeros(8, head.hidden_width)
    rows[:5, : 3 * 64], rows[5:, 3 * 64 :] = given, own
    with torch.no_grad():
        logits = head(torch.tensor([tokens]), torch.arange(8)[None], rows[None])[0]
    expected, _ = oracle.run(tokens, torch.cat((oracle.join(given), own)))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert found.head is not None
    ids = found.head.token_ids
    assert ids is not None and ids.tolist() == oracle.ids.tolist()
    assert found.head.facts.inputs == ["layers.0.add_1", "layers.1.add_1", "layers.2.add_1"]


def test_what_the_head_leaves_out_is_the_models(model: Path, tmp_path: Path) -> None:
    found = load_head(make_head(tmp_path / "head", model, layers=LAYERS, left_out=("lm_head.weight",)), model)
    stored = load_file(model / "model.safetensors")
    for name, theirs in (("embed_tokens.weight", "model.embed_tokens.weight"), ("lm_head.weight", "lm_head.weight")):
        assert torch.equal(found.reader.rows(name, 0, 7), stored[theirs][:7])


def test_the_layers_of_the_paper_are_the_default(tmp_path: Path) -> None:
    model = make_random_model("llama", tmp_path / "model", num_hidden_layers=8)
    found = load_head(make_head(tmp_path / "head", model, eagle_aux_hidden_state_layer_ids=None), model)
    assert found.head is not None
    assert found.head.facts.inputs == ["layers.1.add_1", "layers.3.add_1", "layers.4.add_1"]


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "no head": ({"speculators_model_type": None}, "config.json: no head that drafts: expected speculators_model_type"),
    "another kind": (
        {"speculators_model_type": "dflash"},
        "a head of the kind dflash, which is not built; expected",
    ),
    "layers": (
        {"eagle_aux_hidden_state_layer_ids": [1, 2, 5]},
        "reads the inputs of layers 1, 2, 5 (eagle_aux_hidden_state_layer_ids in config.json), and the model has 5",
    ),
    "fewer rows": (
        {"eagle_aux_hidden_state_layer_ids": [1, 2]},
        "tensor fc.weight gives fc.weight the shape [64, 19",
    ),
    "hidden size": ({"target_hidden_size": 128}, "was made for hidden rows of 128, and"),
    "per layer": ({"fc_norm": True}, "fc_norm in config.json is not built; use a head without it"),
    "draft vocabulary": ({"draft_vocab_size": 90}, "d2t has the shape [100]; expected [90] whole numbers"),
}
OF_LAYER: dict[str, tuple[dict[str, Any], str]] = {
    "vocabulary": ({"vocab_size": 500}, "was made for a vocabulary of 500, and"),
    "layers": ({"num_hidden_layers": 2}, "a head of 2 layers; expected 1"),
    "family": ({"model_type": "qwen3"}, "its layer is of model_type qwen3; expected llama"),
}


@pytest.mark.parametrize(
    ("nested", "fields", "told"),
    [
        *(pytest.param(False, *case, id=name) for name, case in CONFIGS.items()),
        *(pytest.param(True, *case, id=f"layer: {name}") for name, case in OF_LAYER.items()),
    ],
)
def test_a_head_of_another_model_is_told(
    model: Path, tmp_path: Path, nested: bool, fields: dict[str, Any], told: str
) -> None:
    folder = make_head(tmp_path / "head", model, num_drafted=100, layers=LAYERS)
    config = json.loads((folder / "config.json").read_text())
    (config["transformer_layer_config"] if nested else config).update(fields)
    (folder / "config.json").write_text(json.dumps(config))
    compile_refuses(folder, model, told)


TENSORS = {
    "fc.weight": "no tensor for fc.weight; the checkpoint is incomplete",
    "layers.0.hidden_norm.weight": "no tensor for layers.0.hidden_norm.weight; the checkpoint is incomplete",
    "d2t": "no tensor d2t, which names the 100 of 320 tokens that it drafts; the checkpoint is incomplete",
    "lm_head.weight": "no tensor for lm_head.weight",
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_missing_tensor_is_told(model: Path, tmp_path: Path, name: str) -> None:
    folder = make_head(tmp_path / "head", model, num_drafted=100, layers=LAYERS, left_out=(name,))
    compile_refuses(folder, model, TENSORS[name])


def test_ids_beyond_the_vocabulary_are_told(model: Path, tmp_path: Path) -> None:
    folder = make_head(tmp_path / "head", model, num_drafted=100, layers=LAYERS)
    stored = load_file(folder / "model.safetensors")
    save_file({**stored, "d2t": stored["d2t"] + 200}, folder / "model.safetensors")
    compile_refuses(folder, model, "d2t gives ids up to")


def compile_refuses(folder: Path, model: Path, told: str) -> None:
    """Check that a compile is refused as bad input, in one line."""
    with pytest.raises(InfercError) as error:
        refused = load_head(folder, model)
        bind(trace.build(refused.model_class, refused.config, torch.float32, "meta"), refused)
    assert told in str(error.value) and "\n" not in str(error.value) and error.value.exit_code == 2
