"""The CUDA target from artifact to tokens on a fake GPU: kernels run in Triton's interpreter.

The tests themselves are in on_fake_gpu/, in a process of its own: TRITON_INTERPRET=1 must be set before Triton is
imported, and nothing can be compiled there.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from random_models import make_random_model

pytest.importorskip("triton")

from adapters import ALL_LINEAR, write_adapter
from fake_gpu_process import assert_passes, compiled_quickly
from library_data import library_preferred
from manifests import read_manifest, rewrite_manifest

from inferc.codegen.triton import code
from inferc.codegen.triton.code import write_code
from inferc.compiler.add_target import add_target
from inferc.compiler.build import compile
from inferc.config import CompileConfig
from inferc.errors import ConfigError, UnsupportedError
from inferc.manifest import json_bytes
from inferc.manifest_types import CubinProgram
from inferc.runtime.artifact.inspect import inspect_artifact
from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.artifact.sign import sign_artifact
from inferc.runtime.engine.load import load_engine

pytestmark = pytest.mark.long

FOLDER = Path(__file__).parent / "on_fake_gpu"
SUPPORT = Path(__file__).parents[3] / "support"
# Family, dtype, and how it is quantized; experts among them.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "float32", {}),
    "experts-int8": ("qwen3_moe", "float32", {"quantize": "int8", "kv_dtype": "int8"}),
    "llama-int8": ("llama", "float32", {"quantize": "int8"}),
    "qwen3": ("qwen3", "bfloat16", {}),
}
OFTEN = ("llama",)
MORE = ("llama", "experts-int8")
LEFT = ("llama", "qwen3")  # of which there is an artifact that leaves its products to cuBLASLt


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return artifacts of the models of OFTEN without PTX; tests compile in the same way beside them."""
    with compiled_quickly():
        yield compiled(tmp_path_factory.mktemp("cuda"), OFTEN, with_ptx=False)


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return artifacts of the models of OFTEN, with PTX for chips that they have no cubins for."""
    with compiled_quickly():
        yield compiled(tmp_path_factory.mktemp("cuda-ptx"), OFTEN)


def compiled(folder: Path, names: Iterable[str], *, with_ptx: bool = True) -> Path:
    """NAME for a GPU and NAME-reference, for each of the models.

    Of those of LEFT NAME-library too, which leaves products to cuBLASLt; the others never have PTX.
    """
    for name in names:
        family, dtype, how = MODELS[name]
        model = make_random_model(family, folder / "models" / name, dtype)
        of_gpu = f"{name}-library" if name in LEFT else name
        how_written = with_given_ptx(with_ptx and name in LEFT)
        data = library_preferred(folder / "configs", "sm_90", 2, model, dtype) if name in LEFT else nullcontext()
        with data, mock.patch.object(code, "write_code", how_written):
            compile(model, folder / of_gpu, CompileConfig(target="cuda:sm_90", certify="none", **how))
        compile(model, folder / f"{name}-reference", CompileConfig(target="reference", certify="none", **how))
        if name in LEFT:
            copy_without_library(folder / of_gpu, folder / name)
    return folder


def with_given_ptx(wanted: bool) -> Callable[..., Any]:
    """`write_code` with PTX only if it is `wanted` too."""

    def write(*arguments: Any, with_ptx: bool = True) -> Any:
        return write_code(*arguments, with_ptx=with_ptx and wanted)

    return write


def copy_without_library(source: Path, target: Path) -> None:
    """Copy an artifact as it would be if nothing had been measured."""
    shutil.copytree(source, target)
    manifest, file = read_manifest(target), "kernels/sm_90/records.json"
    records = json_bytes([{**record, "library": None} for record in json.loads((target / file).read_bytes())])
    (target / file).write_bytes(records)
    manifest["files"][file] = {"bytes": len(records), "sha256": hashlib.sha256(records).hexdigest()}
    kernels = [{key: row[key] for key in row if key != "library"} for row in manifest["kernels"]]
    rewrite_manifest(target, files=manifest["files"], kernels=kernels)


@pytest.mark.slow
def test_adapters_on_a_fake_gpu(tmp_path: Path) -> None:
    model = make_random_model("llama", tmp_path / "model", "float32")
    with compiled_quickly(), mock.patch.object(code, "write_code", with_given_ptx(False)):
        for name, target in (("adapted", "cuda:sm_90"), ("adapted-reference", "reference")):
            compile(model, tmp_path / name, CompileConfig(target=target, certify="none", adapter_rank=20))
    every = (*ALL_LINEAR, "embed_tokens", "lm_head")
    write_adapter(tmp_path / "adapters" / "everything", model, rank=18, targets=every, ranks={"k_proj": 3})
    write_adapter(tmp_path / "adapters" / "attention", model, rank=2, targets=("q_proj", "v_proj"), seed=1)
    assert_passes(tmp_path, ["adapted"], str(FOLDER / "adapters" / "check_adapters.py"))


def test_on_a_fake_gpu(artifacts: Path) -> None:
    files = map(str, sorted(FOLDER.glob("check_*.py")))
    assert_passes(artifacts, OFTEN, "-m", "not slow", "-k", "not experts", *files)


@pytest.mark.slow
def test_more_on_a_fake_gpu(tmp_path: Path) -> None:
    files = [*map(str, sorted(FOLDER.glob("check_*.py")))]
    with compiled_quickly():
        artifacts = compiled(tmp_path, MORE)
    assert_passes(artifacts, MORE, "-m", "slow", *files)
    assert_passes(artifacts, MORE, "-m", "not slow", "-k", "experts", *files)


@pytest.mark.slow
def test_more_models_on_a_fake_gpu(tmp_path: Path) -> None:
    """With the kernels that they are served with, for every number of rows."""
    assert_passes(compiled(tmp_path, MODELS), [*MODELS, "qwen3-library"], str(FOLDER / "check_models.py"))


@pytest.mark.parametrize("name", ["launches", "scratch", "shared_prefixes", "observable"])
def test_no_field_of_a_gpus_program_may_be_left_out(artifacts: Path, name: str) -> None:
    program = load_artifact(artifacts / "llama", to_run=False).program_json()
    msgspec.convert(program, CubinProgram)
    del program[name]
    with pytest.raises(msgspec.ValidationError, match=f"missing required field `{name}`"):
        msgspec.convert(program, CubinProgram)


def test_what_is_in_an_artifact_for_a_gpu(artifacts: Path) -> None:
    facts = inspect_artifact(artifacts / "llama")
    assert facts.targets == ["cuda:sm_90"]
    assert facts.cubins == {"sm_90": "kernels/sm_90"}
    rows = {row.name: row for row in facts.kernels if row.registers is not None}
    assert {name.partition("-")[0] for name in rows} >= {"linear", "decode_attention", "rms_norm", "choose"}
    for row in rows.values():
        assert row.target == "cuda:sm_90" and row.occupancy is not None and row.registers is not None, row
        assert 0 < row.occupancy <= 1 and row.registers <= 255, row
        assert row.local_bytes == 0, row
    names = {path.name for path in (artifacts / "llama" / "kernels" / "sm_90").glob("*.cubin")}
    assert names == {f"{name}.cubin" for name in rows}


@pytest.mark.slow
def test_the_ptx_of_an_artifact(portable: Path) -> None:
    folder = portable / "llama-library"
    assert inspect_artifact(folder).cubins == {"sm_90": "kernels/sm_90", "ptx": "kernels/ptx"}
    texts = [path.read_text() for path in (folder / "kernels" / "ptx").glob("*.ptx")]
    assert texts and all("\n.target sm_80\n" in text for text in texts), "what is for one chip runs on no other"
    records = json.loads((folder / "kernels" / "ptx" / "records.json").read_text())
    assert not any(record["library"] for record in records), "on a chip that is not known yet nothing was measured"


def test_what_an_artifact_leaves_to_a_library(artifacts: Path) -> None:
    """Is a matter of the chip, so of its records."""
    rows = inspect_artifact(artifacts / "llama-library").kernels
    left = {row.name for row in rows if row.library is not None}
    assert left and all(name.startswith("linear-") for name in left)
    assert {row.library for row in rows if row.library is not None} == {"cublaslt from 2 rows on"}


@pytest.mark.slow
def test_an_artifact_for_a_gpu_has_the_same_bytes_again(portable: Path, tmp_path: Path) -> None:
    """With what was measured of a library left out, those of one that was compiled without."""
    compile(portable / "models" / "llama", tmp_path / "again", CompileConfig(target="cuda:sm_90", certify="none"))
    assert (tmp_path / "again" / "engine.json").read_bytes() == (portable / "llama" / "engine.json").read_bytes()


def given_code(folder: Path) -> Callable[..., Any]:
    """`write_code` that gives each chip the kernels which the artifact in `folder` has for sm_90."""
    rows = [row for row in load_artifact(folder, to_run=False).manifest.kernels if row.registers is not None]

    def write(_: Any, archs: Iterable[str], add: Callable[[str, bytes], None], *_others: Any, with_ptx: bool) -> Any:
        assert not with_ptx, "the PTX that is there is for every chip"
        for arch in archs:
            for path in (folder / "kernels" / "sm_90").iterdir():
                add(f"kernels/{arch}/{path.name}", path.read_bytes())
        return {}, [msgspec.structs.replace(row, target=f"cuda:{arch}") for arch in archs for row in rows]

    return write


def test_another_chip_leaves_the_weights_alone(
    artifacts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    shutil.copytree(artifacts / "llama", out)
    sign_artifact(out, Ed25519PrivateKey.generate())
    (weights,) = out.glob("*.safetensors")
    before = weights.stat().st_ino
    with mock.patch.object(code, "write_code", given_code(out)):
        summary = add_target(artifacts / "models" / "llama", out, CompileConfig(target="cuda:sm_80"))
    assert weights.stat().st_ino == before
    assert not (out / "signature.json").exists(), "nobody signed what was added"
    assert f"its signature is gone; sign it again: inferc sign {out} --key KEY" in caplog.text
    assert summary.config.target == "cuda:sm_90,sm_80"
    loaded = load_artifact(out)
    assert loaded.manifest.targets == ["cuda:sm_90", "cuda:sm_80"]
    assert loaded.entry.cubins == {"sm_90": "kernels/sm_90", "sm_80": "kernels/sm_80"}
    cubins = [row for row in summary.kernels if row.registers is not None]
    of_chips = {target: [row.name for row in cubins if row.target == target] for target in loaded.manifest.targets}
    assert of_chips["cuda:sm_80"] == of_chips["cuda:sm_90"] != []


@pytest.mark.slow
def test_a_chip_that_was_added_has_what_a_compile_for_both_gives_it(portable: Path, tmp_path: Path) -> None:
    model, out = portable / "models" / "llama", tmp_path / "out"
    shutil.copytree(portable / "llama", out)
    add_target(model, out, CompileConfig(target="cuda:sm_80"))
    compile(model, tmp_path / "both", CompileConfig(target="cuda:sm_90,sm_80", certify="none"))
    loaded = load_artifact(out)
    assert set(loaded.entry.cubins) == {"sm_90", "ptx", "sm_80"}
    assert load_artifact(tmp_path / "both").manifest.files == loaded.manifest.files


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        ("llama", {"target": "cuda:sm_90"}, r"has cuda:sm_90 already; it has: cuda:sm_90$"),
        ("experts-int8", {"target": "cuda:sm_80"}, r"is not the model of .*: their configs differ in architectures"),
        ("llama", {"target": "cpu"}, r"is compiled for cuda:sm_90, whose weights do not lie as cpu reads them"),
        ("llama", {"target": "cuda:sm_80", "dtype": "bfloat16"}, r"was compiled with dtype float32, not bfloat16"),
    ],
)
def test_a_target_that_cannot_be_added(
    artifacts: Path, tmp_path: Path, model: str, config: dict[str, str], message: str
) -> None:
    family, dtype, _ = MODELS[model]
    folder = make_random_model(family, tmp_path / model, dtype)
    before = (artifacts / "llama" / "engine.json").read_bytes()
    with pytest.raises(ConfigError, match=message):
        add_target(folder, artifacts / "llama", CompileConfig(**config))  # type: ignore[arg-type]
    assert (artifacts / "llama" / "engine.json").read_bytes() == before


def test_there_is_no_gpu_here(artifacts: Path) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is one")
    with pytest.raises(UnsupportedError, match="no NVIDIA driver on this machine"):
        load_engine(artifacts / "llama")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "capability"), [("llama", [12, 0]), pytest.param("llama-library", [9, 0], marks=pytest.mark.slow)]
)
def test_a_prompt_on_the_command_line(
    portable: Path, generated_by_reference: list[list[int]], model: str, capability: list[int]
) -> None:
    """`inferc generate` gives the reference's ids on a chip with PTX alone, and with cuBLASLt."""
    name, of_fake = portable / model, json.dumps({"capability": capability})
    assert generated(SUPPORT / "on_fake_gpu.py", name, of_fake, "--", "generate", name) == generated_by_reference


@pytest.fixture(scope="module")
def generated_by_reference(portable: Path) -> list[list[int]]:
    return generated("-m", "inferc", "generate", portable / "llama-reference")


def generated(*command: object) -> list[list[int]]:
    """The ids that a command makes of two prompts."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(("src", str(SUPPORT)))}
    options = ["--prompt", "def add", "--prompt", "The quick", "--max-tokens", "4", "--temperature", "0", "--json"]
    done = subprocess.run(
        [sys.executable, *map(str, command), *options], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [output["token_ids"] for output in json.loads(done.stdout)["outputs"]]
