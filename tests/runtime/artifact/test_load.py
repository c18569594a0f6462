"""Loading says in one line what is wrong with an artifact, and works from anywhere it was copied to."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from manifests import read_manifest, rewrite_manifest
from msgspec.structs import replace
from safetensors.torch import load_file

from inferc.arena import MemoryFormula
from inferc.codegen.cpp.build import ISAS
from inferc.errors import ArtifactError
from inferc.manifest import FORMAT_VERSION
from inferc.runtime.artifact.inspect import inspect_artifact
from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.runners.cpu.abi import detect_isa


@pytest.fixture
def copied(tiny_artifact: Path, tmp_path: Path) -> Path:
    """A copy of the tiny artifact that a test may damage."""
    return shutil.copytree(tiny_artifact, tmp_path / "copied")


def load_whole(path: Path) -> None:
    load_artifact(path).verify_weights().wait()


def test_loads_whole(tiny_artifact: Path) -> None:
    load_whole(tiny_artifact)


def test_a_flipped_byte_in_any_file_is_found(copied: Path) -> None:
    files = [path for path in sorted(copied.rglob("*")) if path.is_file()]
    assert {path.suffix for path in files} >= {".json", ".so", ".safetensors", ".txt", ".h", ".cpp"}
    for path in files:
        whole = path.read_bytes()
        for at in (0, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
            with pytest.raises(ArtifactError) as error:
                load_whole(copied)
            assert path.name in str(error.value), f"byte {at}"
            assert "\n" not in str(error.value)
        path.write_bytes(whole)
    load_whole(copied)


def test_a_truncated_or_missing_file_is_found(copied: Path) -> None:
    for name in ["engine.json", *read_manifest(copied)["files"]]:
        whole = (copied / name).read_bytes()
        (copied / name).write_bytes(whole[:-1])
        with pytest.raises(ArtifactError, match="truncated|damaged") as error:
            load_artifact(copied)
        assert name in str(error.value)
        (copied / name).unlink()
        with pytest.raises(ArtifactError, match="is missing|has no engine.json"):
            load_artifact(copied)
        (copied / name).write_bytes(whole)
    load_whole(copied)


def test_damage_within_the_weights_names_the_place(copied: Path) -> None:
    path = next(copied.glob("weights-*"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    check = load_artifact(copied).verify_weights(num_threads=1)
    with pytest.raises(ArtifactError, match=r"weights-00001-of-00001.safetensors is damaged within bytes 0 to"):
        check.wait()


def test_weights_that_cannot_be_read_are_not_taken_for_checked(
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(data: memoryview) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(xxhash, "xxh3_128_hexdigest", fail)
    with pytest.raises(ArtifactError, match=r"cannot read .*weights-00001-of-00001.safetensors: Input/output error"):
        load_artifact(tiny_artifact).verify_weights().wait()


def test_a_fault_of_the_check_itself_comes_out(tiny_artifact: Path) -> None:
    artifact = load_artifact(tiny_artifact)
    for data in artifact.maps.values():
        data.close()
    with pytest.raises(ValueError, match="mmap closed"):
        artifact.verify_weights().wait()


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(
        ArtifactError, match="no artifact at .*/none: there is no such folder; make it with `inferc compile"
    ):
        load_artifact(tmp_path / "none")


def test_not_an_artifact(tmp_path: Path, tiny_llama_folder: Path) -> None:
    with pytest.raises(ArtifactError, match="is not an artifact: it has no engine.json"):
        load_artifact(tmp_path)
    with pytest.raises(ArtifactError, match="is a Hugging Face model; compile it first"):
        load_artifact(tiny_llama_folder)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactError, match="file is a file, expected the folder"):
        load_artifact(tmp_path / "file")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', "\xff"])
def test_a_manifest_of_something_else(tmp_path: Path, text: str) -> None:
    (tmp_path / "engine.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ArtifactError, match=r"engine.json (is damaged|has no format_version)"):
        load_artifact(tmp_path)


def test_another_version(copied: Path) -> None:
    rewrite_manifest(copied, format_version=FORMAT_VERSION + 1)
    with pytest.raises(ArtifactError, match=r"is of format version 3, this inferc reads 2; compile the model again"):
        load_artifact(copied)


def test_an_edited_manifest(copied: Path) -> None:
    path = copied / "engine.json"
    path.write_text(path.read_text().replace('"max_model_len": 256', '"max_model_len": 512'))
    with pytest.raises(ArtifactError, match=r"engine.json is damaged or was edited"):
        load_artifact(copied)


def test_another_target_or_machine(copied: Path) -> None:
    with pytest.raises(ArtifactError, match="is compiled for cpu, not for reference; compile the model with --target"):
        load_artifact(copied, target="reference")
    rewrite_manifest(copied, host="linux-sparc64")
    with pytest.raises(ArtifactError, match="has libraries for linux-sparc64, this machine is"):
        load_artifact(copied)
    assert inspect_artifact(copied).targets == ["cpu"], "it can be looked at anywhere"


@pytest.mark.parametrize("name", ["/etc/passwd", "../outside", "graph/../../outside"])
def test_a_manifest_that_points_outside(copied: Path, name: str) -> None:
    files = json.loads((copied / "engine.json").read_bytes())["files"]
    rewrite_manifest(copied, files={**files, name: {"bytes": 1, "sha256": 64 * "0"}})
    with pytest.raises(ArtifactError, match="which is outside of the artifact"):
        load_artifact(copied)


def test_works_from_a_read_only_folder(copied: Path) -> None:
    entries = [copied, *copied.rglob("*")]
    moved = copied.with_name("moved")
    for path in entries:
        path.chmod(0o555 if path.is_dir() else 0o444)
    copied.rename(moved)
    before = sorted((str(path), path.stat().st_mtime_ns) for path in moved.rglob("*"))
    try:
        load_whole(moved)
        assert before == sorted((str(path), path.stat().st_mtime_ns) for path in moved.rglob("*"))
    finally:
        for path in [moved, *moved.rglob("*")]:
            path.chmod(0o755)


def test_weights_are_what_safetensors_reads(tiny_artifact: Path) -> None:
    artifact = load_artifact(tiny_artifact)
    stored = load_file(tiny_artifact / artifact.weights[0].file)
    assert artifact.weights
    for row in artifact.weights:
        array = artifact.view(row)
        assert array.shape == row.physical_shape
        assert array.ctypes.data % 64 == 0
        assert not array.flags.writeable
        if row.name in stored:
            torch.testing.assert_close(torch.from_numpy(array.copy()), stored[row.name], rtol=0, atol=0)
    with pytest.raises(KeyError, match="no weight 'nothing'"):
        artifact.weight("nothing")


def test_bfloat16_comes_as_its_bits(copied: Path) -> None:
    artifact = load_artifact(copied)
    row = artifact.weights[0]
    halves = replace(row, dtype="bfloat16", physical_shape=(2 * int(np.prod(row.physical_shape)),))
    assert artifact.view(halves).dtype == np.uint16


def test_the_manifest_holds_what_the_runtime_asks(tiny_artifact: Path, pytestconfig: pytest.Config) -> None:
    artifact = load_artifact(tiny_artifact, target="cpu")
    assert artifact.vocab_size == 320
    assert artifact.model.eos_token_ids == [1]
    assert (artifact.max_model_len, artifact.block_size) == (256, 32)
    assert artifact.kv_bytes_per_token == 512, "2 layers, K and V, 2 heads of 16, float32"
    built = ISAS if pytestconfig.getoption("as_shipped") else detect_isa()[:1]
    assert artifact.isas == built
    assert all(artifact.library(isa).data.startswith(b"\x7fELF") for isa in artifact.isas)
    with pytest.raises(ArtifactError, match=f"has no library for isa vector; it has: {', '.join(built)}"):
        artifact.library("vector")
    assert artifact.tokenizer.has_tokenizer


def test_the_memory_formula_rounds_each_maximum_up() -> None:
    formula = MemoryFormula(const=5, per_token=10, per_row=100, per_seq=1000, per_thread=7)
    assert formula.arena_bytes(1, 64, 65, 3) == 5 + 10 * 64 + 100 * 64 + 1000 * 128 + 21


def test_inspect(tiny_artifact: Path) -> None:
    facts = inspect_artifact(tiny_artifact)
    assert (facts.format_version, facts.targets) == (FORMAT_VERSION, ["cpu"])
    assert facts.weights_bytes == sum(path.stat().st_size for path in tiny_artifact.glob("weights-*"))
    assert facts.arena_bytes > 0
    assert facts.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4, "K and V, layers, KV heads, head_dim, float32"
    assert facts.to_json()["kv_groups"] == [
        {
            "kind": "full",
            "layers": [0, 1],
            "num_kv_heads": 2,
            "head_dim": 16,
            "window": 0,
            "dtype": "float32",
            "bytes_per_token": 512,
        }
    ]
    assert facts.certificate is None
    kernels = {kernel["name"]: kernel for kernel in facts.to_json()["kernels"]}
    assert kernels["cpp.paged_attention.float32"] == {
        "name": "cpp.paged_attention.float32",
        "target": "cpu",
        "op": "inferc.paged_attention",
        "nodes": 2,
    }


def test_inspect_shows_engine_json_as_it_is(copied: Path) -> None:
    """Another inferc may have written fields that this one has no type for, and in another order."""
    stored = read_manifest(copied)
    model = {"of_tomorrow": 1, **dict(reversed(stored["model"].items()))}
    rewrite_manifest(copied, model=model)
    shown = inspect_artifact(copied).to_json()
    assert list(shown["model"].items()) == list(model.items())
    assert all(shown[name] == stored[name] for name in ("producer", "config", "passes", "kernels"))
    assert "stored" not in shown and "tensorrt" not in shown and shown["signature"] is None


def test_loading_imports_no_torch(tiny_artifact: Path) -> None:
    code = (
        "import sys; from inferc.runtime.artifact.load import load_artifact;"
        " load_artifact(sys.argv[1]).verify_weights().wait();"
        "assert not {'torch', 'transformers', 'safetensors', 'triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tiny_artifact)], check=True, cwd="/", env={**os.environ})
