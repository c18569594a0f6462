"""The engine beside the Hugging Face model: equal where it is right, and named layer by layer where it is not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import run_inferc
from families import FAMILIES
from random_models import make_random_model
from safetensors.torch import load_file, save_file

import inferc
from inferc.cli import diff as cli_diff
from inferc.compiler import diff as diff_lib
from inferc.compiler.build import compile
from inferc.compiler.diff import Comparison, Distance, LogitsError, diff
from inferc.config import CompileConfig
from inferc.errors import ConfigError, RequestError
from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.step.sampling_params import SamplingParams

PROMPT = list(range(5, 45))
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
FAMILY_NAMES = ["qwen3_moe", "gemma2", "gpt_oss", "deepseek_v3", "olmo2", "granite", "cohere", "opt"]


def run(artifact: Path, model: Path, params: SamplingParams = GREEDY, **options: Any) -> Comparison:
    result = diff(load_artifact(artifact), str(model), PROMPT, params, options, lambda stage: None)
    json.dumps(result.to_json())
    return result


def relative(error: Distance | LogitsError | None) -> float:
    """The relative error, which is there and finite."""
    assert error is not None and error.relative_error is not None
    return error.relative_error


@pytest.fixture
def changed(tiny_llama_folder: Path, tmp_path: Path) -> Path:
    """The tiny model with other numbers in layer 1."""
    folder = tmp_path / "changed"
    shutil.copytree(tiny_llama_folder, folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight"] *= 1.25
    save_file(tensors, file, {"format": "pt"})
    return folder


def test_the_engine_is_the_model_in_every_layer(tiny_artifact: Path, tiny_llama_folder: Path) -> None:
    result = run(tiny_artifact, tiny_llama_folder, max_num_batched_tokens=16)
    assert result.ok and not result.reason and result.parts_at is None
    assert result.tokens.engine == result.tokens.reference and result.tokens.first_difference is None
    (row,) = result.logits
    assert (row.of, row.to, row.top1_agreement) == ("engine", "float32", 1.0)
    assert relative(row) < 1e-5 and row.first_top1_difference is None
    assert [(each.layer, each.rows) for each in result.layers] == [(0, 45), (1, 6)]
    assert all(relative(each.engine_to_model) < 1e-5 for each in result.layers)


def test_the_layer_where_numbers_part_is_named(
    tiny_artifact: Path, changed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(tiny_artifact, changed)
    assert result.ok is False and "allowed 1e-05" in result.reason and result.parts_at == 1
    assert [each.parts for each in result.layers] == [False, True]
    cli_diff._show(result)
    shown = capsys.readouterr().out
    assert [line.split()[:2] for line in shown.splitlines() if "< parts here" in line] == [["layer", "1"]]
    assert "beyond the artifact's budget: its logits are off" in shown


def test_the_command_line_says_it_in_json_and_exit_codes(
    tiny_artifact: Path,
    tiny_llama_folder: Path,
    changed: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "r.jsonl"
    with inferc.LLM(tiny_artifact, record=str(file)) as llm:
        asked = SamplingParams(temperature=0.9, max_tokens=7, ignore_eos=True)
        (answer,) = llm.generate(PROMPT, asked)
    good = run_inferc(
        "diff", tiny_artifact, "--reference", tiny_llama_folder, "--record", file, "--request", "1", "--json"
    )
    assert good.returncode == 0, good.stderr
    tokens = json.loads(good.stdout)["tokens"]
    assert tokens == {"engine": answer.outputs[0].token_ids, "reference": None, "first_difference": None}
    assert cli_diff.diff(tiny_artifact, str(changed), prompt="def add(", max_tokens=4) == 1
    assert "< parts here" in capsys.readouterr().out


def test_what_is_no_comparison_is_refused(tiny_artifact: Path, tiny_llama_folder: Path, tmp_path: Path) -> None:
    other = make_random_model("llama", tmp_path / "other", hidden_size=32)
    with pytest.raises(ConfigError, match="is not the model of .*: found hidden_size 32, expected 64"):
        run(tiny_artifact, other)
    with pytest.raises(RequestError, match="the prompt has 300 tokens"):
        diff(load_artifact(tiny_artifact), str(tiny_llama_folder), [5] * 300, GREEDY, {}, lambda stage: None)
    for options in ([], ["--prompt", "a", "--record", "x"], ["--record", "x"], ["--request", "1", "--prompt", "a"]):
        result = run_inferc("diff", tiny_artifact, "--reference", tiny_llama_folder, *options)
        assert result.returncode == 2 and len(result.stderr.splitlines()) == 1


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("diff")
    model = make_random_model("qwen3", folder / "model", "bfloat16", **FAMILIES["qwen3"].fields)
    compile(model, folder / "artifact", CompileConfig(certify="none", target="reference"))
    return folder / "artifact", model


def test_float32_judges_bfloat16(bfloat16: tuple[Path, Path]) -> None:
    result = run(*bfloat16)
    assert result.ok is True and result.parts_at is None
    assert [(row.of, row.to) for row in result.logits] == [
        ("engine", "bfloat16"),
        ("engine", "float32"),
        ("bfloat16", "float32"),
    ]
    for row in result.layers:
        ours, own = relative(row.engine_to_float32), relative(row.model_to_float32)
        assert 0 < ours < 2 * own


def test_without_room_for_float32_nothing_judges(
    bfloat16: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(diff_lib, "available_memory_bytes", lambda: 1000)
    result = run(*bfloat16)
    assert result.ok is None and "no float32 model fits" in result.reason and len(result.logits) == 1
    cli_diff._show(result)
    assert "not judged against the artifact's budget" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_every_layer_of_a_family_is_compared(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    model = make_random_model(family.model_type(name), tmp_path / "model", "float32", **family.fields)
    compile(model, tmp_path / "artifact", CompileConfig(certify="none", target="reference"))
    result = run(tmp_path / "artifact", model)
    assert result.ok is True
    count = load_artifact(tmp_path / "artifact").model.num_attention_layers
    assert [row.layer for row in result.layers] == list(range(count))
    assert all(relative(row.engine_to_model) < 1e-5 for row in result.layers)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"quantize": "int8"}, {"quantize": "int4"}, {"kv_dtype": "int8"}])
def test_a_lossy_artifact_has_its_schemes_budget(options: dict[str, Any], tmp_path: Path) -> None:
    model = make_random_model("qwen3", tmp_path / "model", "bfloat16", **FAMILIES["qwen3"].fields)
    compile(model, tmp_path / "artifact", CompileConfig(certify="none", **options))
    result = run(tmp_path / "artifact", model)
    assert result.ok is True, result.reason
    assert len(result.layers) == 2
