"""Safetensors files: rows as the safetensors library reads them, and damage refused in one line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from inferc.errors import ArtifactError, InfercError, UnsupportedError
from inferc.frontend.checkpoint.safetensors import INDEX_NAME, TensorDictReader, read_folder, read_header

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool]


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        str(dtype): torch.randint(0, 2, (7, 3, 2), generator=generator).to(torch.float32).to(dtype) for dtype in DTYPES
    } | {"empty": torch.zeros(0, 4), "row": torch.arange(5.0)}


def test_rows_are_what_was_saved(tmp_path: Path) -> None:
    saved = tensors()
    save_file(saved, tmp_path / "model.safetensors", metadata={"format": "pt"})
    reader = read_folder(tmp_path)
    assert reader.tensors == {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in saved.items()}
    for name, tensor in saved.items():
        assert torch.equal(reader.rows(name, 0, tensor.shape[0]), tensor)
    assert torch.equal(reader.rows("torch.bfloat16", 2, 5), saved["torch.bfloat16"][2:5])
    assert reader.rows("row", 3, 3).shape == (0,)


def test_shards_by_index(tmp_path: Path) -> None:
    write_shards(tmp_path)
    reader = read_folder(tmp_path)
    assert sorted(reader.tensors) == ["a", "b"]
    assert reader.rows("b", 0, 2).tolist() == [3.0, 4.0]


def test_module_tensors_are_rows_too() -> None:
    reader = TensorDictReader(torch.nn.Linear(2, 3).state_dict())
    assert reader.tensors["weight"] == ((3, 2), torch.float32)
    assert torch.equal(reader.rows("bias", 1, 3), reader.state["bias"][1:3])


def write_shards(folder: Path) -> None:
    save_file({"a": torch.tensor([1.0, 2.0])}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": torch.tensor([3.0, 4.0])}, folder / "model-00002-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def shard_missing(folder: Path) -> None:
    write_shards(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def tensor_missing(folder: Path) -> None:
    write_shards(folder)
    save_file({"c": torch.zeros(1)}, folder / "model-00002-of-00002.safetensors")


def index_garbage(folder: Path) -> None:
    (folder / INDEX_NAME).write_text("[1]")


def index_empty(folder: Path) -> None:
    (folder / INDEX_NAME).write_text('{"weight_map": {}}')


def tensor_in_two_shards(folder: Path) -> None:
    write_shards(folder)
    save_file({"a": torch.zeros(2), "b": torch.zeros(2)}, folder / "model-00002-of-00002.safetensors")


def index_without_metadata(folder: Path) -> None:
    write_shards(folder)
    index = json.loads((folder / INDEX_NAME).read_text())
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": index["weight_map"]}))


def index_with_other_metadata(folder: Path) -> None:
    write_shards(folder)
    index = json.loads((folder / INDEX_NAME).read_text())
    (folder / INDEX_NAME).write_text(json.dumps({**index, "metadata": None}))


def index_gone(folder: Path) -> None:
    write_shards(folder)
    (folder / INDEX_NAME).unlink()


def other_names(folder: Path) -> None:
    save_file({"a": torch.zeros(1)}, folder / "consolidated.safetensors")


def adapter_beside_weights(folder: Path) -> None:
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
    adapter_alone(folder)


def adapter_alone(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    save_file({"lora_A.weight": torch.zeros(1)}, folder / "adapter_model.safetensors")


def lfs_pointer(folder: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 134\n"
    (folder / "model.safetensors").write_text(pointer)


def index_leaves_folder(folder: Path) -> None:
    save_file({"a": torch.zeros(1)}, folder.parent / "other.safetensors")
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))


def pickled(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def nothing(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def damage(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        path = folder / "model.safetensors"
        save_file({"a": torch.arange(8.0), "b": torch.arange(4.0)}, path)
        path.write_bytes(change(path.read_bytes()))

    return write


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (shard_missing, ArtifactError, "lists model-00002-of-00002.safetensors"),
        (tensor_missing, ArtifactError, "puts tensor b in model-00002-of-00002.safetensors"),
        (index_garbage, ArtifactError, "not a safetensors index"),
        (index_empty, ArtifactError, "an index that names no file"),
        (
            tensor_in_two_shards,
            ArtifactError,
            r"tensor a is in model-00001-of-00002\.safetensors and in model-00002-of-00002\.safetensors; expected each"
            + r" tensor in one file, and model\.safetensors\.index\.json names model-00001-of-00002\.safetensors: save"
            + r" the model again, or take it out of model-00002-of-00002\.safetensors$",
        ),
        (
            index_without_metadata,
            ArtifactError,
            r"model\.safetensors\.index\.json has no metadata; expected an object there, without which transformers"
            + r' reads no shards: add "metadata": \{\}$',
        ),
        (index_with_other_metadata, ArtifactError, r"has the metadata null; expected an object"),
        (index_gone, ArtifactError, r"model-00001-of-00002\.safetensors is there, and model\.safetensors\.index\.json"),
        (other_names, ArtifactError, r"found consolidated\.safetensors, expected model\.safetensors or"),
        (
            adapter_beside_weights,
            ArtifactError,
            (
                r"holds model\.safetensors, and an adapter beside it \(adapter_config\.json\), .*; expected one model:"
                r" delete"
            ),
        ),
        (adapter_alone, UnsupportedError, r"no model\.safetensors but adapter_config\.json: a LoRA adapter; merge it"),
        (
            lfs_pointer,
            ArtifactError,
            r"model\.safetensors is a Git LFS pointer and not the file itself; .*git lfs pull",
        ),
        (index_leaves_folder, ArtifactError, r"lists \.\./other\.safetensors"),
        (pickled, UnsupportedError, r"pickled \(pytorch_model\.bin\).*convert"),
        (nothing, ArtifactError, "no model.safetensors"),
        (damage(lambda data: data[:-1]), ArtifactError, "the file is truncated"),
        (damage(lambda data: data[:60]), ArtifactError, "too few for its header"),
        (damage(lambda data: b""), ArtifactError, "too few for its header"),
        (damage(lambda data: data + b"\0"), ArtifactError, "followed by other data"),
        (damage(lambda data: b"\xff" * 8 + data[8:]), ArtifactError, "too few for its header"),
        (damage(lambda data: data[:8] + b"!" + data[9:]), ArtifactError, "not a safetensors header"),
        (damage(lambda data: data.replace(b'"shape":[8]', b'"shape":[9]')), ArtifactError, "tensor a has 32 bytes"),
        (damage(lambda data: data.replace(b'"F32","shape":[8]', b'"Q4_","shape":[8]')), UnsupportedError, "dtype Q4_"),
        (damage(lambda data: data.replace(b'"F32"', b'"U32"')), UnsupportedError, "dtype U32: an MLX checkpoint"),
    ],
)
def test_damage_is_refused(
    make: Callable[[Path], None], error: type[InfercError], message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    make(folder)
    with pytest.raises(error, match=message) as caught:
        read_folder(folder)
    assert "\n" not in str(caught.value)


def test_header_alone(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3, dtype=torch.bfloat16)}, tmp_path / "x.safetensors")
    header = read_header(tmp_path / "x.safetensors")
    assert header["a"].shape == (2, 3)
    assert header["a"].start + 12 == (tmp_path / "x.safetensors").stat().st_size


# ------------------------------------------------------------------------------------- folders that hold more than one


def write_whole(folder: Path) -> None:
    save_file({"a": torch.tensor([5.0, 6.0]), "b": torch.tensor([7.0, 8.0])}, folder / "model.safetensors")


def stale_index(folder: Path) -> None:
    write_shards(folder)


def stale_index_without_shards(folder: Path) -> None:
    write_shards(folder)
    for path in folder.glob("model-*.safetensors"):
        path.unlink()


def whole_file_as_a_shard(folder: Path) -> None:
    write_shards(folder)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / INDEX_NAME).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            stale_index,
            "holds weights twice: model.safetensors, and model.safetensors.index.json with"
            " model-00001-of-00002.safetensors"
            + " and 1 more; expected one of them: delete model.safetensors.index.json to use model.safetensors",
        ),
        (
            stale_index_without_shards,
            "model.safetensors.index.json lists model-00001-of-00002.safetensors, which is not in FOLDER, and"
            + " model.safetensors beside it is whole, with 2 tensors; delete model.safetensors.index.json",
        ),
        (whole_file_as_a_shard, "with model-00002-of-00002.safetensors; expected one of them"),
        (index_garbage, "not a safetensors index (TypeError('list indices must be integers or slices, not str'));"),
        (index_garbage, "or delete it to use model.safetensors, which is beside it"),
    ],
)
def test_an_index_of_other_files_beside_a_whole_file_is_refused(
    make: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    write_whole(tmp_path)
    make(tmp_path)
    with pytest.raises(ArtifactError) as caught:
        read_folder(tmp_path)
    assert message in str(caught.value).replace(str(tmp_path), "FOLDER") and "\n" not in str(caught.value)


def test_a_damaged_whole_file_is_not_called_whole(tmp_path: Path) -> None:
    stale_index_without_shards(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"123")
    with pytest.raises(ArtifactError, match="beside it is there but damaged"):
        read_folder(tmp_path)


def test_an_index_of_the_whole_file_alone_is_the_same_weights(tmp_path: Path) -> None:
    write_whole(tmp_path)
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": dict.fromkeys("ab", "model.safetensors")}))
    assert read_folder(tmp_path).rows("a", 0, 2).tolist() == [5.0, 6.0]


@pytest.mark.parametrize("write", [write_whole, write_shards])
def test_files_that_transformers_does_not_read_are_not_read(
    write: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path)
    wanted = read_folder(tmp_path).tensors
    save_file({"a": torch.zeros(9)}, tmp_path / "consolidated.safetensors")
    (tmp_path / "consolidated.safetensors.index.json").write_text('{"weight_map": {"a": "consolidated.safetensors"}}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    (tmp_path / "pytorch_model.bin.index.json").write_text("{}")
    assert read_folder(tmp_path).tensors == wanted
    assert not caplog.records


def test_shards_that_are_not_read_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_shards(tmp_path)
    save_file({"a": torch.zeros(9)}, tmp_path / "model-00001-of-00001.safetensors")
    assert read_folder(tmp_path).tensors["a"][0] == (2,)
    assert (
        "model-00001-of-00001.safetensors is not read: the weights are those of model.safetensors.index" in caplog.text
    )
    caplog.clear()
    (tmp_path / INDEX_NAME).unlink()
    write_whole(tmp_path)
    assert read_folder(tmp_path).rows("a", 0, 2).tolist() == [5.0, 6.0]
    assert "model-00001-of-00001.safetensors and 2 more shards are not read: the weights are those of" in caplog.text


def test_a_config_may_name_its_weights(tmp_path: Path) -> None:
    """The config's `transformers_weights` goes before the usual names, as in transformers."""
    write_whole(tmp_path)
    write_shards(tmp_path)
    assert read_folder(tmp_path, "model.safetensors").rows("a", 0, 2).tolist() == [5.0, 6.0]
    assert read_folder(tmp_path, INDEX_NAME).rows("a", 0, 2).tolist() == [1.0, 2.0]
    for named in ("../model.safetensors", "other.safetensors", "pytorch_model.bin", 3):
        with pytest.raises(ArtifactError, match="config.json names the weights .*transformers_weights"):
            read_folder(tmp_path, named)  # type: ignore[arg-type]
