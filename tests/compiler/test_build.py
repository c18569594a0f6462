"""Compiling: the same bytes every time, all of an artifact or nothing of it, and refusals before any work."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from random_models import make_random_model
from safetensors.torch import load_file, save_file

from inferc.codegen import artifact_writer as emit
from inferc.compiler.build import compile
from inferc.config import CompileConfig
from inferc.errors import ArtifactError, ConfigError, UnsupportedError
from inferc.runtime.artifact.inspect import inspect_artifact
from inferc.runtime.artifact.load import load_artifact

QUICK = CompileConfig(target="reference", certify="none")
SCRIPT = """
import sys
from pathlib import Path
from inferc.compiler.build import compile
from inferc.config import CompileConfig

def report(stage, done, total):
    print(stage, flush=True)

model, out, target = sys.argv[1:]
compile(model, out, CompileConfig(target=target, certify="none"), progress=report)
"""


def files_of(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_equal_input_gives_equal_bytes(
    tiny_artifact: Path, tiny_llama_folder: Path, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """The compile runs again in another process, with other hash seeds, elsewhere on disk."""
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    if pytestconfig.getoption("as_shipped"):
        env.pop("INFERC_ISAS", None)
    out = tmp_path / "deeper" / "again"
    subprocess.run(
        [sys.executable, "-c", SCRIPT, tiny_llama_folder, out, "cpu"], check=True, env=env, capture_output=True
    )
    first, second = files_of(tiny_artifact), files_of(out)
    assert sorted(first) == sorted(second)
    assert [name for name in first if first[name] != second[name]] == []


def test_weights_are_written_in_aligned_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[bytes] = []

    class Raw(io.RawIOBase):
        def write(self, data: Any) -> int:
            pieces.append(bytes(data[:40]))  # as a file may: not all of it
            return len(pieces[-1])

    monkeypatch.setattr(emit, "WRITE_BYTES", 64)
    data = bytes(range(200))
    with emit.AlignedWriter(Raw()) as out:
        for begin, end in ((0, 0), (0, 3), (3, 64), (64, 199), (199, 200)):
            out.write(memoryview(data)[begin:end])
    assert b"".join(pieces) == data
    assert [len(piece) for piece in pieces] == [40, 24] * 3 + [8]


def test_no_path_of_this_machine_is_kept(tiny_artifact: Path, tiny_llama_folder: Path) -> None:
    places = [
        str(tiny_llama_folder).encode(),
        str(tiny_artifact.parent).encode(),
        str(Path(__file__).parents[2]).encode(),
    ]
    assert not [name for name, data in files_of(tiny_artifact).items() for place in places if place in data]


def test_an_interrupt_leaves_nothing(tiny_llama_folder: Path, tmp_path: Path) -> None:
    def interrupt(stage: str, _done: int, _total: int) -> None:
        if stage == "write weights":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile(tiny_llama_folder, tmp_path / "a" / "out", QUICK, progress=interrupt)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_leaves_nothing(tiny_llama_folder: Path, tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tiny_llama_folder), str(tmp_path / "out"), "reference"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert any(line.strip() == "capture" for line in process.stdout)
        assert [path.name.startswith(".out.partial-") for path in tmp_path.iterdir()] == [True]
        process.send_signal(number)
        process.stdout.read()
    assert process.returncode != 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "stage"),
    [(signal.SIGINT, "write weights"), (signal.SIGTERM, "capture"), (signal.SIGTERM, "write weights")],
)
def test_a_signal_that_python_swallows_leaves_nothing(
    tiny_llama_folder: Path,
    tmp_path: Path,
    number: signal.Signals,
    stage: str,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """An interrupt that lands in a `__del__`, where Python reports exceptions and goes on, still ends the compile."""

    class Finalised:
        def __del__(self) -> None:
            landed.append(True)
            signal.raise_signal(number)

    class Mistaken:
        def __del__(self) -> None:
            raise ValueError("a mistake")

    def interrupt(name: str, done: int, total: int) -> None:
        if name == stage and (name == "capture" or total - done < 64):
            Finalised()
            Mistaken()

    landed, told = list[bool](), list[object]()
    # What measures the tests' coverage has a handler of its own, and compile() leaves handlers of others alone.
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    request.addfinalizer(partial(signal.signal, signal.SIGTERM, before))
    monkeypatch.setattr("sys.unraisablehook", lambda info: told.append(info.exc_type))
    with pytest.raises(KeyboardInterrupt):
        compile(tiny_llama_folder, tmp_path / "out", QUICK, progress=interrupt)
    assert landed == [True] and told == [ValueError]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_model_without_kernels_is_refused_before_its_reference_runs(tmp_path: Path) -> None:
    folder = make_random_model("llama", tmp_path / "m", head_dim=528)
    stages: list[str] = []
    with pytest.raises(UnsupportedError):
        compile(
            folder, tmp_path / "out", CompileConfig(certify="full"), progress=lambda stage, *_: stages.append(stage)
        )
    assert "run the reference" not in stages
    assert "capture" in stages


def test_broken_weights_are_refused(tmp_path: Path) -> None:
    folder = make_random_model("llama", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ArtifactError, match="tensor model.layers.1.mlp.up_proj.weight has 1 numbers that are NaN"):
        compile(folder, tmp_path / "out", QUICK)
    compile(folder, tmp_path / "out", replace(QUICK, allow_drift=True))


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        compile(tmp_path / "no-model", tmp_path / "a" / "out", QUICK)
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_output_is_refused_before_the_model_is_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(ConfigError, match="cannot write .*; choose an output folder"):
        compile(tmp_path / "no-model", file / "out", QUICK)
    with pytest.raises(ConfigError, match="exists and is not an inferc artifact"):
        compile(tmp_path / "no-model", tmp_path, QUICK)
    assert files_of(tmp_path) == {"file": b"x"}


@pytest.fixture(scope="module")
def reference_artifact(tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("artifacts") / "reference"
    compile(tiny_llama_folder, out, QUICK)
    return out


@pytest.fixture
def module(tiny_llama_folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(tiny_llama_folder, dtype=torch.float32)


def test_a_module_in_memory(reference_artifact: Path, module: Any, tiny_llama_folder: Path, tmp_path: Path) -> None:
    """The module's artifact holds the weights of the folder's; the summary is JSON."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_llama_folder)
    summary = compile(module, tmp_path / "out", QUICK, tokenizer=tokenizer)
    folder, loaded = load_artifact(reference_artifact), load_artifact(tmp_path / "out")
    assert {row.name for row in loaded.weights} == {row.name for row in folder.weights}
    assert all((loaded.view(row) == folder.weight(row.name)).all() for row in loaded.weights)
    assert loaded.tokenizer.has_tokenizer
    assert json.loads(json.dumps(summary.to_json()))["config"]["target"] == "reference"
    assert summary.artifact_bytes > summary.weights_bytes > 0


@pytest.mark.slow
def test_an_artifact_is_replaced(reference_artifact: Path, module: Any, tmp_path: Path) -> None:
    """The new artifact has another dtype and context, and is from a module without a tokenizer."""
    out = shutil.copytree(reference_artifact, tmp_path / "out")
    config = CompileConfig(target="reference", certify="none", dtype="bfloat16", max_model_len=64)
    compile(module, out, config)
    facts = inspect_artifact(out)
    assert (facts.config.dtype, facts.config.max_model_len) == ("bfloat16", 64)
    assert facts.model.max_model_len == 64
    assert not load_artifact(out).tokenizer.has_tokenizer
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
