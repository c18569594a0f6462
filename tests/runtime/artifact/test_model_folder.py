"""A model's folder in place of an artifact: it is compiled once, into a cache by what is in it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import run_inferc
from http_calls import request
from serving import Server

from inferc.errors import UnsupportedError
from inferc.manifest import MANIFEST
from inferc.runtime.artifact import model_folder
from inferc.runtime.artifact.model_folder import artifact_of, cached_artifacts, digest_of, is_model_folder, prune
from inferc.runtime.engine.llm import LLM
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.system.env import cache_dir


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache with the compiled kernels of the tests' own, and no artifact."""
    folder, own = tmp_path_factory.mktemp("cache"), cache_dir() / "cpp"
    own.mkdir(parents=True, exist_ok=True)
    (folder / "cpp").symlink_to(own)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INFERC_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def model(tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(tiny_llama_folder, tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def artifact(cache: Path, model: Path) -> Path:
    return artifact_of(model)


def tokens(path: Path) -> list[int]:
    with LLM(path, num_threads=1) as llm:
        return llm.generate("def add(", SamplingParams(temperature=0, max_tokens=6))[0].outputs[0].token_ids


def test_a_model_is_compiled_once(artifact: Path, cache: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert artifact.parent.parent == cache / "artifacts" and (artifact / MANIFEST).is_file()
    assert (artifact / "certificate.json").is_file()
    monkeypatch.setattr(model_folder, "_compile", lambda *_: pytest.fail("it is there already"))
    assert artifact_of(model) == artifact
    assert tokens(model) == tokens(artifact)


def test_an_artifact_is_what_it_is(artifact: Path, tmp_path: Path) -> None:
    assert artifact_of(artifact) == artifact and not is_model_folder(artifact)
    assert artifact_of(tmp_path / "none") == tmp_path / "none"


def test_the_digest_is_of_the_contents(model: Path, cache: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(model, tmp_path / "copy"))
    assert digest_of(copied) == digest_of(model)
    (copied / "README.md").write_text("nothing that a compile reads")
    assert digest_of(copied) == digest_of(model)
    (weights,) = copied.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert digest_of(copied) != digest_of(model)
    os.replace(shutil.copy(next(model.glob("*.safetensors")), tmp_path / "again"), weights)
    assert digest_of(copied) == digest_of(model)


def test_a_machine_with_a_gpu_compiles_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model_folder, "find_arch", lambda: "sm_90")
    assert model_folder.best_target() == "cuda:sm_90"
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert model_folder.best_target() == "cpu"
    assert (
        "triton is not installed: models' folders are compiled for the CPU; pip install 'inferc[cuda]'" in caplog.text
    )
    monkeypatch.setattr(model_folder, "find_arch", lambda: "sm_75")
    assert model_folder.best_target() == "cpu" and "no kernels for this machine's GPU (sm_75)" in caplog.text
    monkeypatch.setattr(model_folder, "find_arch", lambda: None)
    assert model_folder.best_target() == "cpu"


def test_a_target_has_an_artifact_of_its_own(artifact: Path, model: Path, cache: Path, tmp_path: Path) -> None:
    asked: list[str] = []

    def compile(_: Path, out: Path, target: str) -> None:
        asked.append(target)
        shutil.copytree(artifact, out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INFERC_CACHE", str(tmp_path))
        patch.setattr(model_folder, "_compile", compile)
        patch.setattr(model_folder, "find_arch", lambda: "sm_90")
        found = [artifact_of(model), artifact_of(model, "cpu"), artifact_of(model), artifact_of(model, "cpu")]
    assert asked == ["cuda:sm_90", "cpu"]
    assert found[0] == found[2] != found[1] == found[3]


def test_files_are_read_once(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = digest_of(model)
    monkeypatch.setattr(model_folder, "_digest", lambda _: pytest.fail("read again"))
    assert digest_of(model) == found
    (cache / "artifacts" / "digests.json").write_text("{")  # as after a full disk
    monkeypatch.undo()
    assert digest_of(model) == found


def test_a_model_that_cannot_be_compiled_says_why(model: Path, cache: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(model, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    with pytest.raises(UnsupportedError, match="mamba"):
        artifact_of(other)
    done = run_inferc("generate", other, "--prompt", "a")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "mamba" in done.stderr
    assert not any(each.name.startswith("other") for each in cached_artifacts())


def test_a_server_takes_a_models_folder(artifact: Path, model: Path, cache: Path) -> None:
    with Server(model, under=("env", f"INFERC_CACHE={cache}")) as server:
        assert [each["id"] for each in request(server.url, "/v1/models").json["data"]] == ["tiny"]
        reply = request(server.url, "/v1/completions", {"prompt": "def add(", "max_tokens": 6, "temperature": 0})
        assert reply.status == 200 and reply.json["choices"][0]["text"]


def test_what_is_in_the_cache_is_listed_and_removed(artifact: Path, model: Path, cache: Path, tmp_path: Path) -> None:
    older = Path(shutil.copytree(artifact.parent, cache / "artifacts" / "older-0123456789abcdef"))
    (older / "last-used").write_text(json.dumps({"model": "/models/older", "time": 1.0}))
    names = [artifact.parent.name, older.name]
    listed = json.loads(run_inferc("cache", "list", "--json").stdout)["artifacts"]
    assert [each["name"] for each in listed] == names and listed[0]["model"] == str(model.resolve())
    assert listed[0]["bytes"] == listed[1]["bytes"] > 100_000
    shown = run_inferc("cache", "list").stdout.splitlines()
    assert len(shown) == 3 and shown[-1].startswith("2 artifacts, ")
    assert (
        run_inferc("cache", "prune", "--keep", f"{listed[0]['bytes']}")
        .stdout.splitlines()[0]
        .startswith("removed older-0123456789abcdef")
    )
    assert [each.name for each in cached_artifacts()] == names[:1]
    assert prune(model=str(tmp_path)) == []
    assert [each["name"] for each in json.loads(run_inferc("cache", "prune", "--json").stdout)["removed"]] == names[:1]
    assert cached_artifacts() == [] and not artifact.exists()


def test_a_cache_that_cannot_be_written_is_told(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("INFERC_CACHE", str(tmp_path / "file"))
    done = run_inferc("generate", model, "--prompt", "a")
    assert done.returncode == 2 and "set INFERC_CACHE" in done.stderr and len(done.stderr.splitlines()) == 1
