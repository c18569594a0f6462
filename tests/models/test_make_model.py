"""The benchmark models: real shapes that transformers loads without a missing or unexpected key."""

import hashlib
import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from inferc.frontend.checkpoint.load import load as checkpoint_of_folder

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "make_model.py"
PUBLISHED_PARAMETERS = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "mistral-7b": 7_248_023_552,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
}


@pytest.fixture(scope="module")
def make_model() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_model", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_model"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder() -> Iterator[Path]:
    """Deleted at once, where tmp_path would keep hundreds of MB of three runs."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def run(make_model: ModuleType, *args: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(make_model.app, [str(arg) for arg in args])
    return result.exit_code, result.output


def load(folder: Path) -> tuple[Any, dict[str, Any]]:
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.bfloat16)
    model, info = loaded
    return model.eval(), info


@pytest.mark.slow
def test_two_layers_of_qwen3_load_in_transformers(make_model: ModuleType, folder: Path) -> None:
    code, output = run(make_model, "qwen3-0.6b", folder / "model", "--layers", "2")
    assert code == 0, output
    model, info = load(folder / "model")
    assert not any(info.values()), info
    assert model.config.num_hidden_layers == 2 and model.config.vocab_size == 151936
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer("def f(x):").input_ids])).logits.float()
    assert logits.isfinite().all() and 0.1 < logits.std() < 2.0
    assert not list(folder.glob(".*")), "the temporary folder is gone"


def test_a_sparse_model_takes_no_disk(make_model: ModuleType, folder: Path) -> None:
    code, output = run(make_model, "llama-3.1-70b", folder / "model", "--sparse")
    assert code == 0, output
    files = list((folder / "model").glob("*.safetensors"))
    checkpoint = checkpoint_of_folder(folder / "model")
    assert sum(file.stat().st_size for file in files) > 140e9
    assert sum(512 * file.stat().st_blocks for file in files) < 10e6
    assert checkpoint.config.num_hidden_layers == 80
    assert not checkpoint.reader.rows("model.layers.79.mlp.down_proj.weight", 8190, 8192).any()


SMALL = (64, 96, 2, 2, 1)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama3", {"factor": 8.0, "tied": False}),
        ("mistral", {"vocab_size": 300, "sliding_window": 16}),
        ("mixtral", {}),
        ("qwen2", {"vocab_size": 300}),
        ("qwen3", {"vocab_size": 300}),
        ("qwen3_moe", {"experts": 8}),
    ],
)
def test_every_family_loads_from_shards(
    make_model: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, family: str, options: dict[str, Any]
) -> None:
    config = getattr(make_model, family)(*SMALL, **options) | {"vocab_size": 300}
    monkeypatch.setitem(make_model.SHAPES, "small", make_model.Shape(config))
    monkeypatch.setattr(make_model, "MAX_SHARD_BYTES", 50_000)
    code, output = run(make_model, "small", folder / "model")
    assert code == 0, output
    assert len(list((folder / "model").glob("model-*.safetensors"))) > 1
    model, info = load(folder / "model")
    assert not any(info.values()), info
    norm = model.model.norm.weight
    assert norm.float().std() > 0.01, "norms vary, so that a misplaced one changes the output"
    with torch.no_grad():
        assert model(torch.arange(20)[None]).logits.isfinite().all()


def test_the_same_seed_gives_the_same_bytes(
    make_model: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_model.qwen3(*SMALL, vocab_size=300)
    monkeypatch.setitem(make_model.SHAPES, "small", make_model.Shape(config))
    digests = []
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert run(make_model, "small", folder / name, "--seed", seed)[0] == 0
        digests.append(hashlib.sha256((folder / name / "model.safetensors").read_bytes()).hexdigest())
    assert digests[0] == digests[1] != digests[2]


def test_parameter_counts_are_the_published_ones(make_model: ModuleType) -> None:
    for name, expected in PUBLISHED_PARAMETERS.items():
        weights = make_model.weights_of(make_model.SHAPES[name].config)
        assert sum(weight.num_elements for weight in weights) == expected, name


def test_list_prints_every_shape(make_model: ModuleType) -> None:
    code, output = run(make_model, "--list")
    assert code == 0
    assert all(name in output for name in make_model.SHAPES)


def test_bad_input_is_one_line_and_exit_code_2(make_model: ModuleType, tmp_path: Path) -> None:
    existing = tmp_path / "existing"
    existing.mkdir()
    (existing / "notes.txt").write_text("mine")
    cases: list[tuple[list[str | Path], str]] = [
        (["qwen9", tmp_path / "x"], "unknown shape 'qwen9'; one of qwen2.5-0.5b, qwen3-0.6b"),
        (["qwen3-0.6b", tmp_path / "x", "--dtype", "int3"], "unknown dtype 'int3'"),
        (["qwen3-0.6b", tmp_path / "x", "--layers", "0"], "--layers is 0"),
        (["qwen3-0.6b", existing], "exists; give another folder, or --force"),
        (["qwen3-0.6b", existing, "--force"], "is not a model folder"),
        (["qwen3-0.6b"], "SHAPE and OUT are both needed"),
    ]
    for args, message in cases:
        code, output = run(make_model, *args)
        assert code == 2 and message in output and output.count("\n") == 1, output
    assert not (tmp_path / "x").exists() and (existing / "notes.txt").read_text() == "mine"


def test_force_replaces_a_model_folder(make_model: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_model.qwen3(*SMALL, vocab_size=300)
    monkeypatch.setitem(make_model.SHAPES, "small", make_model.Shape(config))
    assert run(make_model, "small", folder / "model")[0] == 0
    (folder / "model" / "stale.txt").write_text("old")
    assert run(make_model, "small", folder / "model")[0] == 2
    assert run(make_model, "small", folder / "model", "--force")[0] == 0
    assert not (folder / "model" / "stale.txt").exists()
