"""Whole models: their plans, and what artifacts say of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import run_inferc
from manifests import read_manifest
from random_models import make_random_model

from inferc.compiler.build import compile
from inferc.config import CompileConfig
from inferc.errors import ConfigError, UnsupportedError
from inferc.manifest import TENSORRT_LAYERS, TENSORRT_PLAN
from inferc.runtime.artifact.inspect import inspect_artifact
from inferc.runtime.artifact.load import load_artifact
from inferc.targets import Target

SCHEMES = ("int8", "w8a8", "fp8")
SHIPPED = Path(__file__).parents[3] / "examples" / "models"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensorrt")
    make_random_model("llama", folder / "model", "bfloat16", max_position_embeddings=1024)
    how = CompileConfig(target="tensorrt:sm_86", max_model_len=1000, certify="none")
    compile(folder / "model", folder / "out", how)
    return folder / "out"


def test_an_artifact_is_one_plan_with_the_weights_in_it(artifact: Path) -> None:
    names = {path.relative_to(artifact).as_posix() for path in artifact.rglob("*") if path.is_file()}
    assert TENSORRT_PLAN in names and not any(name.endswith(".safetensors") for name in names)
    loaded = load_artifact(artifact)
    assert not loaded.weights and list(loaded.maps) == [TENSORRT_PLAN]
    source = (artifact.parent / "model" / "model.safetensors").stat().st_size
    assert len(loaded.maps[TENSORRT_PLAN]) > source, "the weights are in bfloat16, as the checkpoint has them"


def test_the_manifest_says_what_built_the_plan_and_for_what(artifact: Path) -> None:
    manifest = read_manifest(artifact)
    assert manifest["targets"] == ["tensorrt:sm_86"] and manifest["config"]["dtype"] == "bfloat16"
    plan = manifest["tensorrt"]
    assert (plan["package"], plan["arch"]) == ("tensorrt_rtx", "sm_86") and plan["version"].startswith("1.")
    assert [each["name"] for each in plan["profiles"]] == ["decode", "prefill"]
    assert manifest["determinism"]["contract"].startswith("none")
    assert manifest["config"]["block_size"] == 1024, "rows of the cache begin at multiples of 256 bytes"


def test_layers_bear_the_names_of_nodes(artifact: Path) -> None:
    layers = json.loads((artifact / TENSORRT_LAYERS).read_bytes())
    names = [layer["name"] for layer in layers]
    assert len(set(names)) == len(names)
    assert any(name.startswith("layers.0.") for name in names)
    facts = inspect_artifact(artifact).tensorrt
    assert facts is not None and facts.layers is not None
    kinds = facts.layers
    assert kinds["kv_cache_update"] == 4 and kinds["attention_input"] == kinds["attention_output"] == 2
    done = run_inferc("inspect", artifact)
    assert "4 kv_cache_update" in done.stdout and "for sm_86" in done.stdout, done.stderr


@pytest.mark.slow
def test_equal_input_gives_equal_bytes_but_for_the_plan(tmp_path: Path) -> None:
    """TensorRT-RTX orders what is in a plan by chance; nothing else is by chance."""
    found = []
    for name in ("one", "two"):
        config = CompileConfig(target="tensorrt:sm_86", max_model_len=256, certify="none")
        compile(SHIPPED / "tiny-draft", tmp_path / name, config)
        paths = [path for path in (tmp_path / name).rglob("*") if path.is_file()]
        files = {path.relative_to(tmp_path / name).as_posix(): path.read_bytes() for path in paths}
        manifest = json.loads(files.pop("engine.json"))
        del files[TENSORRT_PLAN], manifest["sha256"], manifest["files"][TENSORRT_PLAN]
        found.append((files, manifest))
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny-moe", "tiny-llama", "tiny-draft"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_120"])
@pytest.mark.parametrize(
    "options",
    [{"dtype": "bfloat16"}, {"dtype": "float16"}, {"dtype": "float32"}, *({"quantize": scheme} for scheme in SCHEMES)],
    ids=str,
)
def test_shipped_models_build(model: str, arch: str, options: dict[str, str], tmp_path: Path) -> None:
    target = f"tensorrt:{arch}"
    if options.get("quantize") == "fp8" and "fp8" not in Target.parse(target).schemes:
        with pytest.raises(UnsupportedError, match="--quantize fp8: it takes int8, w8a8"):
            CompileConfig(target=target, quantize="fp8")
    else:
        config = CompileConfig(target=target, certify="none", **options)  # type: ignore[arg-type]
        compile(SHIPPED / model, tmp_path / "out", config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 2}, "target tensorrt:sm_86: --tp 2: it takes 1; leave it out, or use --target cpu"),
        ({"quantize": "int4"}, "--quantize int4: it takes int8, w8a8; leave it out, or use --target cpu"),
        ({"quantize": "fp8"}, "--quantize fp8: it takes int8, w8a8; leave it out, or use --target tensorrt:sm_89"),
        (
            {"kv_dtype": "int8"},
            "--kv-dtype int8: it takes bfloat16, float32, float16; leave it out, or use --target tensorrt-paged:sm_86",
        ),
        (
            {"target": "cpu", "quantize": "fp8"},
            "target cpu: --quantize fp8: it takes int8, .*int4-g128; leave it out, or use --target tensorrt:sm_89",
        ),
        (
            {"target": "cuda:sm_90", "quantize": "fp8"},
            "target cuda:sm_90: --quantize fp8: it takes int8; leave it out, or use --target tensorrt:sm_89",
        ),
        ({"block_size": 32}, "--block-size 32: it does not take it; leave it out, or use --target cpu"),
        ({"target": "tensorrt:sm_90"}, "target tensorrt:sm_90: TensorRT-RTX .* builds for .*, or --target cuda:sm_90"),
    ],
)
def test_what_is_refused(options: dict[str, object], message: str, tmp_path: Path) -> None:
    config = {"target": "tensorrt:sm_86", "certify": "none", **options}
    with pytest.raises((UnsupportedError, ConfigError), match=message):
        compile(SHIPPED / "tiny-draft", tmp_path / "out", CompileConfig(**config))  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_bfloat16_on_a_chip_without_it_is_refused_in_one_line(tmp_path: Path) -> None:
    config = CompileConfig(target="tensorrt:sm_75", max_model_len=256, certify="none")
    with pytest.raises(
        UnsupportedError, match="cannot build a plan for sm_75: .*sm75, because the model contains HW-spec"
    ):
        compile(SHIPPED / "tiny-draft", tmp_path / "out", config)


@pytest.mark.slow
def test_the_other_targets_do_not_import_it() -> None:
    code = "import sys, inferc.compiler.build, inferc.codegen.tensorrt.table; assert 'tensorrt_rtx' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
