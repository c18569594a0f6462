"""Weight files: every tensor in its final layout at a multiple of 64 bytes, stored once, readable by safetensors."""

from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file
from torch import Tensor

from inferc import weights as weight_lib
from inferc.codegen.emit import ArtifactWriter, plan_weight_files
from inferc.codegen.folder import OutputFolder
from inferc.manifest import ALIGNMENT, CHUNK_BYTES, ChunkDigests
from inferc.weights import Weight, constant


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


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_digests_do_not_depend_on_the_pieces(size: int) -> None:
    data = bytes(size)
    digests = ChunkDigests()
    for start in range(0, size, 30_000_001):
        digests.update(memoryview(data[start : start + 30_000_001]))
    expected = [xxhash.xxh3_128_hexdigest(data[at : at + CHUNK_BYTES]) for at in range(0, size, CHUNK_BYTES)]
    assert digests.finish() == expected
    assert digests.num_bytes == size
