"""The tensorrt-paged target from artifact to tokens on a fake GPU: interpreted kernels, engines by their networks.

The tests of steps are in on_fake_gpu/segments, in a process of its own; plans are TensorRT-RTX's, built here for sm_86.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import run_inferc
from random_models import make_random_model

pytest.importorskip("triton")

from fake_gpu_process import assert_passes, compiled_quickly

from inferc.compiler.add_target import add_target
from inferc.compiler.build import compile
from inferc.config import CompileConfig
from inferc.errors import ConfigError, UnsupportedError
from inferc.manifest import TENSORRT_LAYERS
from inferc.runtime.artifact.inspect import inspect_artifact
from inferc.runtime.artifact.load import load_artifact

FOLDER = Path(__file__).parent / "on_fake_gpu" / "segments"
LONG = "tokens_are_the_references or found_in_files"
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "float32", {}),
    "experts-int8": ("qwen3_moe", "float32", {"kv_dtype": "int8", "quantize": "int8"}),
    "qwen3": ("qwen3", "bfloat16", {"quantize": "w8a8"}),
}


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with compiled_quickly():
        yield compiled(tmp_path_factory.mktemp("segments"), ["llama"])


def compiled(folder: Path, names: Iterable[str]) -> Path:
    """NAME for a GPU with TensorRT, and NAME-reference."""
    for name in names:
        family, dtype, how = MODELS[name]
        model = make_random_model(family, folder / "models" / name, dtype)
        for suffix, target in (("", "tensorrt-paged:sm_86"), ("-reference", "reference")):
            config = CompileConfig(target=target, certify="none", **how)
            compile(model, folder / f"{name}{suffix}", config)
    return folder


def test_on_a_fake_gpu(artifacts: Path) -> None:
    assert_passes(artifacts, ["llama"], "-k", f"not ({LONG})", str(FOLDER / "check_segments.py"))


@pytest.mark.slow
def test_more_on_a_fake_gpu(artifacts: Path) -> None:
    assert_passes(artifacts, ["llama"], "-k", LONG, str(FOLDER / "check_segments.py"))


@pytest.mark.slow
def test_more_models_on_a_fake_gpu(tmp_path: Path) -> None:
    """With the kernels that they are served with."""
    others = [name for name in MODELS if name != "llama"]
    file = str(FOLDER / "check_segments.py")
    assert_passes(compiled(tmp_path, others), others, "-k", "references", file)


def test_what_is_in_an_artifact(artifacts: Path) -> None:
    loaded = load_artifact(artifacts / "llama")
    manifest = loaded.manifest
    assert manifest.targets == ["tensorrt-paged:sm_86"] and manifest.config.block_size == 32
    assert loaded.entry.cubins == {"sm_86": "kernels/sm_86"}, "no PTX: on another chip no plan runs"
    assert manifest.determinism.contract.startswith("none")
    facts = loaded.manifest_json()["tensorrt"]
    assert (facts["package"], facts["arch"]) == ("tensorrt_rtx", "sm_86")
    assert facts["plans"] == [{"name": f"segment-{index}", "calls": 1} for index in range(3)]
    assert facts["profiles"] == [
        {"name": "decode", "max_num_tokens": 256, "max_num_rows": 256},
        {"name": "prefill", "max_num_tokens": 8192, "max_num_rows": 8192},
    ]
    step = loaded.program.launches.step
    kinds = [launch.engine or launch.node.rpartition(".")[2] for launch in step]
    assert kinds[:3] == ["rope_table", "segment-0", "rope_kv_write"], kinds
    assert [kind for kind in kinds if kind.startswith("segment")] == ["segment-0", "segment-1", "segment-2"]
    assert {launch.order or "fast" for launch in step} == {"fast"}, "--deterministic is refused"
    assert step[kinds.index("segment-1")].rows == "tokens" and step[-1].rows == "rows"


def test_what_inspect_says(artifacts: Path) -> None:
    facts = inspect_artifact(artifacts / "llama")
    assert facts.weights_bytes == sum(path.stat().st_size for path in (artifacts / "llama").glob("*.safetensors"))
    assert facts.tensorrt is not None and facts.tensorrt.plans is not None
    first, *_ = facts.tensorrt.plans
    assert first.layers["matrix_multiply"] == 1 and first.plan_bytes > 10_000
    layers = json.loads((artifacts / "llama" / TENSORRT_LAYERS).read_bytes())
    assert [*layers] == ["segment-0", "segment-1", "segment-2"]
    assert any(layer["name"].startswith("layers.0.") for layer in layers["segment-0"])
    done = run_inferc("inspect", artifacts / "llama")
    assert "for sm_86, 3 without weights, for 3 segments of a step" in done.stdout, done.stderr
    assert "at most 8192 tokens, 8192 rows a call" in done.stdout and "segment-2" in done.stdout


def test_no_chip_is_added_to_it(artifacts: Path) -> None:
    config = CompileConfig(target="cuda:sm_90")
    with pytest.raises(
        ConfigError,
        match="is compiled for tensorrt-paged:sm_86, whose plans are for one chip; .*compile the model into another",
    ):
        add_target(artifacts / "models" / "llama", artifacts / "llama", config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 2}, "target tensorrt-paged:sm_86: --tp 2: it takes 1; leave it out, or use --target cpu"),
        ({"quantize": "int4"}, "--quantize int4: it takes int8, w8a8; leave it out, or use --target cpu"),
        (
            {"dtype": "float16"},
            "--dtype float16: it takes bfloat16, float32; leave it out, or use --target tensorrt:sm_86",
        ),
        ({"target": "tensorrt-paged:sm_75"}, "target 'tensorrt-paged:sm_75': no kernels for sm_75; known: sm_80"),
        ({"target": "tensorrt-paged:sm_90"}, "target tensorrt-paged:sm_90: TensorRT-RTX .*, or --target cuda:sm_90"),
        ({"target": "tensorrt-paged"}, "a plan is for one chip; write for example tensorrt-paged:sm_86"),
        ({"target": "tensorrt-paged:sm_80,sm_86"}, "a plan is for one chip; write for example tensorrt-paged:sm_86"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str, artifacts: Path, tmp_path: Path) -> None:
    with pytest.raises((UnsupportedError, ConfigError), match=message):
        config = CompileConfig(**{"target": "tensorrt-paged:sm_86", "certify": "none", **options})
        compile(artifacts / "models" / "llama", tmp_path / "out", config)
    assert not (tmp_path / "out").exists()
