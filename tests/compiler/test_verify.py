"""`inferc verify`: certificates anew, with what runs the artifact."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command_line import run_inferc
from safetensors.torch import load_file, save_file

from inferc.compiler.build import compile
from inferc.compiler.verify import Verification, verify
from inferc.config import CompileConfig
from inferc.errors import ConfigError, UnsupportedError

SHIPPED = Path(__file__).parents[2] / "examples" / "models"


def run(artifact: Path, model: Path) -> Verification:
    return verify(artifact, str(model), lambda stage, done, total: None)


@pytest.mark.slow
def test_a_certificate_is_what_it_was(tiny_llama_folder: Path, tmp_path: Path) -> None:
    summary = compile(tiny_llama_folder, tmp_path / "out", CompileConfig(certify="full", quantize="w8a8"))
    assert summary.certificate is not None
    done = run_inferc("verify", tmp_path / "out", "--reference", tiny_llama_folder, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] and not found["reason"]
    assert found["passes"] == json.loads(json.dumps(summary.certificate.to_json()))["rows"]
    assert found["kl"] == found["passes"][-1]["kl"] and found["passes"][-1]["name"] == "kernels"


def test_other_weights_than_the_models_are_the_kernels_fault(tiny_llama_folder: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(tiny_llama_folder, changed)
    (file,) = changed.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight"] *= 1.25
    save_file(tensors, file, {"format": "pt"})
    compile(changed, tmp_path / "out", CompileConfig(certify="none"))
    done = run_inferc("verify", tmp_path / "out", "--reference", tiny_llama_folder)
    assert done.returncode == 1
    assert "beyond the artifact's budget: kernels: " in done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines() if "< over its budget" in line] == ["kernels"]


@pytest.mark.slow
def test_the_rows_are_those_of_the_artifacts_certificate(
    tiny_llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are of all passes after `--certify full`, unless memory is short, and of two questions otherwise."""
    summary = compile(tiny_llama_folder, tmp_path / "auto", CompileConfig(quantize="int8"))
    assert summary.certificate is not None
    found = run(tmp_path / "auto", tiny_llama_folder)
    assert found.passes == summary.certificate.rows
    compile(tiny_llama_folder, tmp_path / "full", CompileConfig(certify="full"))
    assert "page_kv_cache" in [row.name for row in run(tmp_path / "full", tiny_llama_folder).passes]
    monkeypatch.setattr("inferc.compiler.verify.available_memory_bytes", lambda: 1000)
    found = run(tmp_path / "full", tiny_llama_folder)
    assert found.ok and found.passes[0].name == "program"


@pytest.mark.slow
def test_an_onnx_artifact_that_was_compiled_without_a_certificate(tmp_path: Path) -> None:
    compile(SHIPPED / "tiny-llama", tmp_path / "out", CompileConfig(target="onnx", certify="none", max_model_len=128))
    found = run(tmp_path / "out", SHIPPED / "tiny-llama")
    assert found.ok and found.passes[-1].ran_by.startswith("onnxruntime ")
    assert found.greedy_equal is None and found.kl is not None


@pytest.mark.slow
def test_several_ranks(tiny_llama_folder: Path, tmp_path: Path) -> None:
    compile(tiny_llama_folder, tmp_path / "out", CompileConfig(certify="none", tp=2))
    found = run(tmp_path / "out", tiny_llama_folder)
    assert found.ok and "2 ranks" in found.passes[-1].ran_by


def test_what_is_refused(tiny_artifact: Path, tiny_llama_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not the model of .*: found vocab_size"):
        run(tiny_artifact, SHIPPED / "tiny-llama")
    compile(tiny_llama_folder, tmp_path / "reference", CompileConfig(target="reference", certify="none"))
    with pytest.raises(UnsupportedError, match="runs on the ops' references: verify does not judge that"):
        run(tmp_path / "reference", tiny_llama_folder)
