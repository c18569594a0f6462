"""Vectors of texts: those that the Hugging Face model gives, alone, batched and in chunks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from random_models import make_random_model

from inferc.compiler.build import compile
from inferc.config import CompileConfig
from inferc.errors import ConfigError, RequestError
from inferc.frontend.checkpoint.load import load
from inferc.frontend.text.pooling import pooling
from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.engine.llm import LLM

TYPES = "sentence_transformers.models."
RNG = np.random.default_rng(0)
TEXTS = [RNG.integers(5, 250, size).tolist() for size in (1, 2, 31, 32, 33, 100, 200, 7, 7, 64)]


def say_pooling(folder: Path, config: Any, *modules: str) -> None:
    entries = [
        {"idx": index, "name": str(index), "path": f"{index}_{name}" if index else "", "type": TYPES + name}
        for index, name in enumerate(("Transformer", "Pooling", *modules))
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model("llama", tmp_path_factory.mktemp("models") / "m", num_hidden_layers=2)


def vector_of(llm: LLM, ids: list[int]) -> list[float]:
    (answer,) = llm.embed(ids)
    return answer.outputs.embedding


def reference(model: Path, ids: list[int], kind: str, normalize: bool) -> Any:
    base = transformers.AutoModel.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        rows = base(torch.tensor([ids])).last_hidden_state[0].double()
    vector = {"last": rows[-1], "mean": rows.mean(0), "first": rows[0]}[kind]
    return (vector / vector.norm() if normalize else vector).numpy()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "config", "modules", "target"),
    [
        ("last", {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, ("Normalize",), "cpu"),
        ("mean", {"pooling_mode_mean_tokens": True}, (), "cpu"),
        ("first", {"pooling_mode": "cls"}, ("Normalize",), "cpu"),
        ("mean", {"pooling_mode": "mean"}, ("Normalize",), "reference"),
    ],
)
def test_vectors_are_those_of_the_model(
    model: Path, tmp_path: Path, kind: str, config: Any, modules: tuple[str, ...], target: str
) -> None:
    say_pooling(model, config, *modules)
    compile(model, tmp_path / "out", CompileConfig(target=target, certify="none"))
    wanted = [reference(model, ids, kind, bool(modules)) for ids in TEXTS]
    for options in ({}, {"max_num_batched_tokens": 16, "max_num_seqs": 4}):
        with LLM(tmp_path / "out", **options) as llm:
            alone = [vector_of(llm, ids) for ids in TEXTS]
            answers = llm.embed(TEXTS)
            together = [each.outputs.embedding for each in answers]
            answer = llm.generate([5, 6, 7])[0]
        assert len(answer.outputs[0].token_ids) > 0, "it generates as well"
        assert [each.prompt_token_ids for each in answers] == TEXTS and all(each.finished for each in answers)
        assert answers[0].outputs.hidden_size == len(wanted[0])
        for found, want in zip(alone, wanted, strict=True):
            np.testing.assert_allclose(found, want, atol=2e-5)
        if target == "cpu":
            assert alone == together, "to the last bit, whatever shares the step"


@pytest.mark.slow
@pytest.mark.slow
def test_bfloat16(model: Path, tmp_path: Path) -> None:
    say_pooling(model, {"pooling_mode_mean_tokens": True}, "Normalize")
    compile(model, tmp_path / "out", CompileConfig(dtype="bfloat16", certify="none"))
    with LLM(tmp_path / "out") as llm:
        for ids in TEXTS:
            want = reference(model, ids, "mean", True)
            assert float(np.dot(vector_of(llm, ids), want)) > 0.999


def test_a_model_without_a_pooling_makes_none(tiny_artifact: Path) -> None:
    with LLM(tiny_artifact) as llm, pytest.raises(RequestError, match="this model makes no vectors of texts"):
        llm.embed([5, 6, 7])


@pytest.mark.parametrize(
    ("config", "modules", "message"),
    [
        ({"pooling_mode_max_tokens": True}, (), "pooling pooling_mode_max_tokens is not supported"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, (), "is not supported"),
        ({"pooling_mode": "weightedmean"}, (), "pooling weightedmean is not supported"),
        ({}, (), "pooling none is not supported"),
        (
            {"pooling_mode_mean_tokens": True},
            ("Dense", "Normalize"),
            "modules Transformer, Pooling, Dense, Normalize are",
        ),
    ],
)
def test_poolings_that_are_left_out_with_a_warning(
    model: Path, config: Any, modules: tuple[str, ...], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    say_pooling(model, config, *modules)
    assert pooling(load(model)) is None and message in caplog.text


def test_damaged_files(model: Path) -> None:
    say_pooling(model, {})
    (model / "1_Pooling" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read it"):
        pooling(load(model))
    (model / "modules.json").write_text("{}")
    with pytest.raises(ConfigError, match="expected a list of modules"):
        pooling(load(model))


@pytest.mark.slow
def test_quantized_rows_that_are_no_floats_make_none(model: Path, tmp_path: Path) -> None:
    say_pooling(model, {"pooling_mode_mean_tokens": True})
    compile(model, tmp_path / "out", CompileConfig(dtype="bfloat16", quantize="w8a8", certify="none"))
    artifact = load_artifact(tmp_path / "out")
    hidden = artifact.program.step.hidden.dtype
    with LLM(tmp_path / "out") as llm:
        if hidden == "int8":
            with pytest.raises(RequestError, match="makes no vectors"):
                llm.embed([5, 6, 7])
        else:
            want = reference(model, TEXTS[5], "mean", False)
            found = np.array(vector_of(llm, TEXTS[5]))
            assert np.dot(found, want) / np.linalg.norm(found) / np.linalg.norm(want) > 0.99
