"""The loading of the MTP layer of a checkpoint: it is transformers' own, and what is none is told in one line."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_models import MtpOracle, make_mtp_model, needs_mtp
from random_models import make_random_model
from safetensors.torch import load_file, save_file

from inferc.errors import ArtifactError, InfercError
from inferc.frontend.checkpoint.bind import bind
from inferc.frontend.checkpoint.load import Checkpoint, load
from inferc.frontend.checkpoint.mtp_layers import mtp_layers
from inferc.frontend.heads.load_mtp import load_mtp
from inferc.frontend.trace import torch_export as trace
from inferc.ir import weights as weight_lib

OTHERS = ("deepseek_v3", "mellum", "glm4_moe_lite")
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 58, 97, 93, 238, 46, 264, 33, 83, 279, 50, 288, 41, 97, 169, 39, 93, 75, 105]


def module_of(found: Checkpoint) -> Any:
    """Return a head in PyTorch with the weights that it is bound to."""
    head = trace.build(found.model_class, found.config, torch.float32, "cpu")
    binding = bind(trace.build(found.model_class, found.config, torch.float32, "meta"), found)
    head.load_state_dict({name: weight_lib.read_whole(each, found.reader) for name, each in binding.weights.items()})
    return head


@needs_mtp
@pytest.mark.parametrize("family", ["glm4_moe", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_the_head_computes_what_transformers_does(family: str, tmp_path: Path) -> None:
    folder = make_mtp_model(family, tmp_path / "model")
    found, oracle = load_mtp(load(folder), "float32", 256), MtpOracle(folder)
    assert found.head is not None and found.head.facts.inputs == ["norm.mul_1"]
    assert found.head.facts.own == "layers.0.post_norm.mul_1"
    rows, text = oracle.rows(TOKENS[:-1]), torch.tensor([TOKENS[1:]])
    places = torch.arange(len(TOKENS) - 1)[None]
    with torch.no_grad():
        logits = module_of(found)(text, places, rows)
        expected = oracle.mtp._project_to_logits(oracle.mtp.forward_layer(0, rows, places + 1, None, input_ids=text))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@needs_mtp
@pytest.mark.parametrize("family", ["glm4_moe", "mellum"])
def test_the_oracle_drafts_what_transformers_generates_with(family: str, tmp_path: Path) -> None:
    """The candidates of `generate(use_mtp=True)`, which has an MTP layer draft one token, with its caches and masks."""
    from transformers import GenerationConfig
    from transformers.generation.candidate_generator import MTPCandidateGenerator

    oracle = MtpOracle(make_mtp_model(family, tmp_path / "model"))
    generator = MTPCandidateGenerator(oracle.model, GenerationConfig(do_sample=False), {})
    generator.mtp_model = oracle.mtp
    known = len(TOKENS) - 6
    with torch.no_grad():
        for count in (known, *range(known + 1, len(TOKENS))):  # a prompt, and then one token after another
            ids = torch.tensor([TOKENS[:count]])
            outputs = oracle.model(ids[:, :-1], output_hidden_states=True)
            if count > known:
                outputs.hidden_states = [each[:, -1:] for each in outputs.hidden_states]
            places = {"position_ids": torch.arange(count)[None]}
            drafted, _ = generator.get_candidates(ids, places, outputs, is_first_iteration=False, n_last_matches=0)
            assert drafted[0, count:].tolist() == oracle.draft(TOKENS[:count], 1)


@needs_mtp
@pytest.mark.slow
def test_of_several_layers_the_first_drafts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_mtp_model("glm4_moe", tmp_path / "model", num_mtp=2)
    of = load(folder)
    assert len(mtp_layers(of.config, of.tensors)) == 2
    found, oracle = load_mtp(of, "float32", 256), MtpOracle(folder)
    assert "has 2 MTP layers: the first one drafts, and the others are left out" in caplog.text
    assert not any(name.startswith("model.layers.3.") for name in found.tensors)
    rows = oracle.rows(TOKENS[:-1])
    with torch.no_grad():
        logits = module_of(found)(torch.tensor([TOKENS[1:]]), torch.arange(len(TOKENS) - 1)[None], rows)
    assert int(logits[0, -1].argmax()) == oracle.draft(TOKENS, 1)[0]


def test_a_model_without_its_layer_leaves_it_out(tmp_path: Path) -> None:
    of = load(make_mtp_model("glm4_moe", tmp_path / "model"))
    binding = bind(trace.build(of.model_class, of.config, torch.float32, "meta"), of)
    assert sorted(binding.ignored) == sorted(mtp_layers(of.config, of.tensors)[0])


def test_layers_that_config_json_does_not_count_are_no_mtp_layers(tmp_path: Path) -> None:
    """A layer more than config.json has, without what joins a token and a row, is not left out."""
    folder = make_random_model("llama", tmp_path / "model", num_hidden_layers=3)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    of = load(folder)
    assert not mtp_layers(of.config, of.tensors)
    with pytest.raises(ArtifactError, match=r"tensor model\.layers\.2\..* has no use in LlamaForCausalLM"):
        bind(trace.build(of.model_class, of.config, torch.float32, "meta"), of)


def refused(folder: Path, told: str) -> None:
    """Check that the MTP layer of a folder is refused as bad input, in one line."""
    with pytest.raises(InfercError, match=re.escape(told)) as error:
        load_mtp(load(folder), "float32", 256)
    assert "\n" not in str(error.value) and error.value.exit_code == 2


def test_a_checkpoint_without_is_told(tmp_path: Path) -> None:
    refused(
        make_random_model("llama", tmp_path / "model"), "has no MTP layers; leave it out, or give a checkpoint that"
    )


@needs_mtp
@pytest.mark.parametrize(
    ("family", "name", "told"),
    [
        ("glm4_moe", "hnorm.weight", "no tensor for layers.0.hnorm.weight; the checkpoint is incomplete"),
        pytest.param(
            "glm4_moe_lite",
            "hnorm.weight",
            "--mtp: the MTP layers of glm4_moe_lite are not like those that transformers has code of (",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_missing_tensor_is_told(family: str, name: str, told: str, tmp_path: Path) -> None:
    folder = make_mtp_model(family, tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    del stored[f"model.layers.2.{name}"]
    save_file(stored, folder / "model.safetensors")
    refused(folder, told)


def test_an_older_transformers_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "inferc.frontend.heads.mtp", None)  # so that importing it fails
    refused(make_mtp_model("glm4_moe", tmp_path / "model"), "the installed transformers has no code of MTP layers; upg")
