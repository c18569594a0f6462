"""Weight files: every tensor in its final layout at a multiple of 64 bytes, stored once, readable by safetensors."""

from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file
from torch import Tensor

from inferc.codegen.artifact_writer import ArtifactWriter, count_broken, plan_weight_files
from inferc.codegen.folder import OutputFolder
from inferc.errors import ArtifactError, ConfigError
from inferc.frontend.checkpoint.safetensors import TensorDictReader
from inferc.ir import weights as weight_lib
from inferc.ir.weights import Weight, constant
from inferc.manifest import ALIGNMENT, CHUNK_BYTES, ChunkDigests
from inferc.runtime.artifact.load import load_artifact


class NoReader:
    def rows(self, name: str, start: int, stop: int) -> Tensor:
        raise AssertionError("all weights here are constants")


def some_weights() -> dict[str, Weight]:
    torch.manual_seed(0)
    matrix = constant(torch.randn(20, 5))
    return {
        "odd": constant(torch.randn(3)),
        "matrix": matrix,
        "panels": weight_lib.pack(constant(torch.randn(20, 7).bfloat16()), "panel16_k2"),
        "same": matrix,
        "ids": constant(torch.arange(5)),
    }


def write(path: Path, weights: dict[str, Weight]) -> ArtifactWriter:
    with OutputFolder(path) as folder:
        writer = ArtifactWriter(folder)
        writer.add_weights(weights, NoReader(), lambda done, total: None)
        folder.commit()
    return writer


def test_what_is_read_back_is_what_the_expressions_say(tmp_path: Path) -> None:
    weights = some_weights()
    writer = write(tmp_path / "out", weights)
    stored = load_file(tmp_path / "out" / "weights-00001-of-00001.safetensors")
    for name in ("odd", "matrix", "panels", "ids"):
        expected = torch.cat(list(weight_lib.materialize(weights[name], NoReader())))
        torch.testing.assert_close(stored[name], expected, rtol=0, atol=0)
    assert stored["panels"].shape == (2, 4, 16, 2)
    assert [row.name for row in writer.weights] == list(weights)


def test_offsets_are_aligned_and_right(tmp_path: Path) -> None:
    weights = some_weights()
    writer = write(tmp_path / "out", weights)
    data = (tmp_path / "out" / "weights-00001-of-00001.safetensors").read_bytes()
    for row in writer.weights:
        assert row.offset % ALIGNMENT == 0
        whole = torch.cat(list(weight_lib.materialize(weights[row.name], NoReader())))
        assert data[row.offset : row.offset + row.num_bytes] == whole.view(torch.uint8).numpy().tobytes()


def test_equal_weights_are_stored_once(tmp_path: Path) -> None:
    rows = {row.name: row for row in write(tmp_path / "out", some_weights()).weights}
    assert rows["matrix"].offset == rows["same"].offset
    assert "same" not in load_file(tmp_path / "out" / "weights-00001-of-00001.safetensors")


def test_large_models_get_several_files() -> None:
    weights = {f"w{i}": constant(torch.full((64,), float(i))) for i in range(5)}
    files, _ = plan_weight_files(weights, max_bytes=512)
    assert [file.name for file in files] == [f"weights-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert [[tensor.name for tensor in file.tensors] for file in files] == [["w0", "w1"], ["w2", "w3"], ["w4"]]
    assert all(len(file.header()) % ALIGNMENT == 0 for file in files)


def test_a_weight_larger_than_a_file_gets_its_own() -> None:
    weights = {
        "small": constant(torch.zeros(16)),
        "large": constant(torch.zeros(1000)),
        "last": constant(torch.ones(16)),
    }
    files, _ = plan_weight_files(weights, max_bytes=512)
    assert [[tensor.name for tensor in file.tensors] for file in files] == [["small"], ["large"], ["last"]]


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    with OutputFolder(tmp_path / "out") as folder:
        ArtifactWriter(folder).add_weights(some_weights(), NoReader(), lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert {total for _, total in seen} == {64 + 448 + 512 + 64}
    assert seen[-1][0] == 64 + 448 + 512 + 40


BROKEN = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_broken_numbers_are_counted(dtype: torch.dtype) -> None:
    finite = torch.tensor([0.0, -0.0, 1e-40, -1.0, torch.finfo(dtype).max, torch.finfo(dtype).min], dtype=dtype)
    assert count_broken(finite) == 0
    assert count_broken(torch.cat([finite, torch.tensor(BROKEN, dtype=dtype), finite]).view(3, 5)) == 3
    assert count_broken(torch.full((3 << 18,), float("nan"), dtype=dtype)) == 3 << 18
    assert count_broken(torch.full((4,), -1)) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_broken_weight_is_refused_by_the_tensors_name(
    tmp_path: Path, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = {name: torch.ones(16, 4, dtype=dtype) for name in ("q_proj", "k_proj")}
    tensors["k_proj"][3, :2] = torch.tensor(BROKEN[:2])
    reader = TensorDictReader(tensors)
    parts = tuple(weight_lib.source(name, (16, 4), dtype) for name in tensors)
    weights = {"qkv": weight_lib.pack(weight_lib.concat(parts), "panel16_k1")}
    with OutputFolder(tmp_path / "out") as folder:
        with pytest.raises(
            ArtifactError, match="tensor k_proj has 2 numbers that are NaN or infinite; expected finite"
        ):
            ArtifactWriter(folder).add_weights(weights, reader, lambda done, total: None)
        ArtifactWriter(folder, allow_broken=True).add_weights(weights, reader, lambda done, total: None)
    assert "tensor k_proj has 2 numbers" in caplog.text


def test_a_weight_that_overflows_is_refused(tmp_path: Path) -> None:
    weights = {"w": weight_lib.cast(constant(torch.tensor([1.0, 1e6])), torch.float16)}
    with (
        OutputFolder(tmp_path / "out") as folder,
        pytest.raises(ArtifactError, match="w has 1 .* infinite as float16;"),
    ):
        ArtifactWriter(folder).add_weights(weights, NoReader(), lambda done, total: None)


def test_a_manifest_that_cannot_be_written(tmp_path: Path, tiny_artifact: Path) -> None:
    facts = load_artifact(tiny_artifact).manifest
    with OutputFolder(tmp_path / "out") as folder:
        folder.path.rmdir()
        folder.path.write_text("in the way")
        with pytest.raises(ConfigError, match="cannot write .*/out/engine.json: "):
            ArtifactWriter(folder).write_manifest(facts)


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_digests_do_not_depend_on_the_pieces(size: int) -> None:
    data = bytes(size)
    digests = ChunkDigests()
    for start in range(0, size, 30_000_001):
        digests.update(memoryview(data[start : start + 30_000_001]))
    expected = [xxhash.xxh3_128_hexdigest(data[at : at + CHUNK_BYTES]) for at in range(0, size, CHUNK_BYTES)]
    assert digests.finish() == expected
    assert digests.num_bytes == size
