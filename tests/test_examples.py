"""Every example runs alone, stays short, and is tried here on a tiny random model."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(example: str, *arguments: str | Path, cwd: Path) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = [sys.executable, str(EXAMPLES / example), *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_examples_are_short() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert lengths.pop("line.py") <= 150, "it is read in one sitting"
    assert lengths and all(length < 60 for length in lengths.values()), lengths


@pytest.mark.slow
def test_help_is_their_first_lines(tmp_path: Path) -> None:
    for path in EXAMPLES.glob("*.py"):
        assert f"python examples/{path.name}" in run(path.name, "--help", cwd=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_compile_and_generate(tiny_llama_folder: Path, tmp_path: Path) -> None:
    out = run("compile_and_generate.py", tiny_llama_folder, tmp_path / "out", cwd=tmp_path)
    assert out.startswith("compiled") and out.count("---") == 3


def test_sampling(tiny_artifact: Path, tmp_path: Path) -> None:
    first, second = (run("sampling.py", tiny_artifact, cwd=tmp_path) for _ in range(2))
    assert first.count("---") == 3 and first == second


def test_program(tiny_artifact: Path, tmp_path: Path) -> None:
    out = run("program.py", tiny_artifact, cwd=tmp_path)
    assert out.count("---") == 2 and out.rstrip().endswith("prompt tokens were in the cache")


@pytest.mark.slow
def test_own_pass(tmp_path: Path) -> None:
    plain, tokens, own, same_tokens = run("own_pass.py", tmp_path / "out", cwd=tmp_path).splitlines()
    assert "'cpp.add.float32': 5" in plain and "'example.add_rms_norm': 5" in own and "cpp.add." not in own
    assert tokens.count("[") == 2 and tokens == same_tokens


def test_stream_client(served: str, tmp_path: Path) -> None:
    out = run("stream_client.py", served, "abc", cwd=tmp_path)
    assert "llama, float32" in out and out.rstrip().endswith("tokens")


@pytest.mark.slow
def test_demo(tmp_path: Path) -> None:
    out = run("demo.py", tmp_path / "out", cwd=EXAMPLES.parent)
    assert "ready grpc=127.0.0.1:" in out and "server stopped, exit code 0" in out


def test_the_whole_line(
    tiny_llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokens are those that transformers generates; the artifact runs without its model."""
    script = EXAMPLES / "line.py"  # in this process, which has traced a model before: the first one takes seconds
    monkeypatch.setattr(sys, "argv", [str(script), str(tiny_llama_folder), str(tmp_path / "out"), "def add"])
    runpy.run_path(str(script), run_name="__main__")
    out = capsys.readouterr().out
    assert "fuse_rms_norm: " in out and "last_row: 1 rewrites" in out
    found = json.loads(out.splitlines()[-2])
    prompt = Tokenizer.from_file(str(tiny_llama_folder / "tokenizer.json")).encode("def add").ids
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_llama_folder, dtype=torch.float32)
    generated = model.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False, eos_token_id=-1)
    assert found == generated[0, len(prompt) :].tolist()
