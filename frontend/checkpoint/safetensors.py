"""The reading of safetensors files: their headers, checked against the files' sizes, and rows of their tensors.

A checkpoint is read one chunk of rows at a time and never as a whole; nothing here unpickles anything.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inferc.errors import ArtifactError, UnsupportedError
from inferc.frontend.checkpoint.unreadable import ADAPTER, ADAPTER_CONFIG, a, is_lfs_pointer, lfs_pointer

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
INDEX_SUFFIX = ".safetensors.index.json"
INDEX_NAME = "model" + INDEX_SUFFIX
SINGLE_NAME = "model.safetensors"
NAMED_SUFFIXES = (".safetensors", INDEX_SUFFIX)  # suffixes of the files that a config may name
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

TensorSpec = tuple[tuple[int, ...], torch.dtype]  # shape, dtype as stored


@dataclass(frozen=True)
class StoredTensor:
    """The place of one tensor: bytes [start, start + its size) of `file`."""

    file: Path
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class SafetensorsReader:
    """A TensorReader over the tensors of one or many safetensors files."""

    def __init__(self, stored: dict[str, StoredTensor]) -> None:
        self.stored = stored

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        return {name: (tensor.shape, tensor.dtype) for name, tensor in self.stored.items()}

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return a copy of rows [start, stop) of axis 0 of tensor `name`, in the dtype it is stored in."""
        tensor = self.stored[name]
        shape = (stop - start, *tensor.shape[1:])
        row_bytes = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
        data = bytearray(row_bytes * (stop - start))
        if not data:
            return torch.empty(shape, dtype=tensor.dtype)
        with tensor.file.open("rb", buffering=0) as file:
            file.seek(tensor.start + start * row_bytes)
            _read_into(file.fileno(), memoryview(data), tensor.file)
        return torch.frombuffer(data, dtype=tensor.dtype).view(shape)


class TensorDictReader:
    """A TensorReader over tensors in memory, such as those of a module."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.state = {name: tensor.detach() for name, tensor in state.items()}

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self.state.items()}

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        tensor = self.state[name]
        rows = tensor[start:stop] if tensor.dim() else tensor.reshape(1)  # a scalar is its own only row
        return rows.cpu()


def read_folder(folder: Path, named: str | None = None) -> SafetensorsReader:
    """Open the tensors of the safetensors files of a Hugging Face folder.

    named: the file, or the index, that config.json's `transformers_weights` names instead of the usual ones.
    Raises UnsupportedError for pickled weights, and ArtifactError for weights that are missing, truncated, damaged, or
    there twice (in a whole file beside an index of shards, or in two shards), and for an index that transformers cannot
    read.
    """
    stored: dict[str, StoredTensor] = {}
    files = weight_files(folder, named)
    index = folder / (named or INDEX_NAME)
    for path in files:
        found = read_header(path)
        if twice := sorted(stored.keys() & found.keys()):
            raise _in_two_files(index, twice[0], stored[twice[0]].file.name, path.name)
        stored.update(found)
    if index.name.endswith(INDEX_SUFFIX) and index.is_file():
        for name, file in _weight_map(index).items():
            if name not in stored or stored[name].file.name != file:
                raise ArtifactError(
                    f"{index} puts tensor {name} in {file}, which does not hold it; download both again"
                )
    return SafetensorsReader(stored)


def _in_two_files(index: Path, name: str, first: str, second: str) -> ArtifactError:
    """Return the error for a tensor that is in two shards.

    transformers reads the last of them, whatever the index says.
    """
    meant = _weight_map(index).get(name)
    both = f"{index.parent}: tensor {name} is in {first} and in {second}; expected each tensor in one file"
    if meant not in (first, second):
        return ArtifactError(f"{both}, and {index.name} names neither: download them again")
    other = second if meant == first else first
    return ArtifactError(f"{both}, and {index.name} names {meant}: save the model again, or take it out of {other}")


def weight_files(folder: Path, named: str | None = None) -> list[Path]:
    """Return the safetensors files of a Hugging Face folder; raise if one is missing or the choice is ambiguous."""
    if named is not None:
        # A config comes with the checkpoint: like an index, it may only name files beside itself.
        is_beside = isinstance(named, str) and Path(named).name == named and (folder / named).is_file()
        if not is_beside or not named.endswith(NAMED_SUFFIXES):
            raise ArtifactError(
                f"{folder}: config.json names the weights {named} (transformers_weights); expected a .safetensors file"
                f" or a {INDEX_SUFFIX} in the folder: download it, or delete the field"
            )
        return _shards(folder / named) if named.endswith(INDEX_SUFFIX) else [folder / named]
    index, single = folder / INDEX_NAME, folder / SINGLE_NAME
    if index.is_file() and single.is_file():
        _check_same_weights(index, single)
    files = [single] if single.is_file() else _shards(index) if index.is_file() else []
    if not files:
        raise _no_weights(folder)
    if (folder / ADAPTER_CONFIG).is_file():
        raise ArtifactError(
            f"{folder} holds {files[0].name}, and an adapter beside it ({ADAPTER_CONFIG}), which transformers would add"
            " where peft is installed; expected one model: delete the adapter's files to use the weights as they are,"
            " or merge it into them"
        )
    _warn_of_others(folder, files)
    return files


def _shards(index: Path) -> list[Path]:
    """Return the files that an index names; raise ArtifactError if one is missing."""
    names = sorted(set(_weight_map(index).values()))
    for name in names:
        # An index comes with the checkpoint: it may only name files beside itself.
        if Path(name).name != name or not (index.parent / name).is_file():
            raise ArtifactError(f"{index} lists {name}, which is not in {index.parent}; download the missing file")
    facts = json.loads(index.read_text())
    if not isinstance(facts.get("metadata"), dict):
        found = f"the metadata {json.dumps(facts['metadata'])[:60]}" if "metadata" in facts else "no metadata"
        raise ArtifactError(
            f"{index} has {found}; expected an object there, without which transformers reads no shards: add"
            ' "metadata": {}'
        )
    return [index.parent / name for name in names]


def _check_same_weights(index: Path, single: Path) -> None:
    """Raise ArtifactError if an index beside a whole file names other files than that one.

    transformers reads the whole file, other programs read the shards: nothing tells which of the two is the model.
    """
    try:
        names = set(_weight_map(index).values())
    except ArtifactError as error:
        raise ArtifactError(f"{error}, or delete it to use {single.name}, which is beside it") from None
    if names == {single.name}:
        return
    others = sorted(names - {single.name})
    listed = others[0] + (f" and {len(others) - 1} more" if len(others) > 1 else "")
    missing = [name for name in others if Path(name).name != name or not (index.parent / name).is_file()]
    if not missing:
        raise ArtifactError(
            f"{index.parent} holds weights twice: {single.name}, and {INDEX_NAME} with {listed}; expected one of them:"
            f" delete {INDEX_NAME} to use {single.name}, as transformers does, or {single.name} to use what the index"
            " lists"
        )
    try:
        state = f"is whole, with {len(read_header(single))} tensors"
    except (ArtifactError, UnsupportedError):
        state = "is there but damaged"
    raise ArtifactError(
        f"{index} lists {missing[0]}, which is not in {index.parent}, and {single.name} beside it {state}; delete"
        f" {INDEX_NAME} to use {single.name}, or download the missing files and delete {single.name}"
    )


def _no_weights(folder: Path) -> ArtifactError | UnsupportedError:
    """Return the error for a folder without the usual weight files, naming what it has instead."""
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    shards = [name for name in others if SHARD.fullmatch(name)]
    if (folder / ADAPTER_CONFIG).is_file():
        return UnsupportedError(f"{folder}: no {SINGLE_NAME} but {ADAPTER_CONFIG}: {ADAPTER}")
    if shards:
        return ArtifactError(
            f"{folder}: {shards[0]} is there, and {INDEX_NAME}, which says what is in which file, is not; download it"
            " too"
        )
    if pickled:
        return UnsupportedError(
            f"{folder}: weights are pickled ({pickled[0]}) and a pickle can run any code; expected {SINGLE_NAME}:"
            " convert with transformers (from_pretrained, then save_pretrained)"
        )
    gguf = sorted(path.name for path in folder.glob("*.gguf"))
    if gguf and not others:
        return UnsupportedError(
            f"{folder}: {gguf[0]} is a GGUF file, which is not read yet; expected {SINGLE_NAME}: give the folder that"
            " it was made from"
        )
    if others:
        return ArtifactError(
            f"{folder}: found {others[0]}, expected {SINGLE_NAME} or {INDEX_NAME} with its shards; download these too"
        )
    return ArtifactError(f"{folder}: no {SINGLE_NAME} and no {INDEX_NAME}; download the weights too")


def _warn_of_others(folder: Path, files: list[Path]) -> None:
    """Warn of shards that are not read: an earlier checkpoint left them behind, or the index does not name them."""
    read = {path.name for path in files}
    left = sorted(
        path.name for path in folder.glob("*.safetensors") if SHARD.fullmatch(path.name) and path.name not in read
    )
    if left:
        log.warning(
            "%s: %s not read: the weights are those of %s",
            folder,
            f"{left[0]} is" if len(left) == 1 else f"{left[0]} and {len(left) - 1} more shards are",
            SINGLE_NAME if SINGLE_NAME in read else INDEX_NAME,
        )


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one safetensors file, each of which lies within it and has the size its shape wants."""
    size = path.stat().st_size
    if is_lfs_pointer(path):
        raise ArtifactError(lfs_pointer(path))
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ArtifactError(
                f"{path}: {size} bytes, too few for its header; the file is truncated, download it again"
            )
        text = file.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries = {name: _stored(path, name, entry, 8 + length) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{path}: its header is not a safetensors header ({error}); download it again") from error
    end = max((tensor.start + _num_bytes(tensor) for tensor in entries.values()), default=8 + length)
    if end != size:
        what = "truncated" if end > size else "followed by other data"
        raise ArtifactError(f"{path}: {size} bytes, its header wants {end}; the file is {what}, download it again")
    return entries


def _stored(path: Path, name: str, entry: dict[str, Any], base: int) -> StoredTensor:
    if entry["dtype"] == "U32":
        raise UnsupportedError(
            f"{path}: tensor {name} is of dtype U32: {a('MLX')} checkpoint, whose packed weights are not read yet; use"
            " the original, unquantized model"
        )
    if entry["dtype"] not in DTYPES:
        raise UnsupportedError(f"{path}: tensor {name} is of dtype {entry['dtype']}; known: {', '.join(DTYPES)}")
    start, stop = entry["data_offsets"]
    tensor = StoredTensor(path, base + start, tuple(int(size) for size in entry["shape"]), DTYPES[entry["dtype"]])
    if start < 0 or min(tensor.shape, default=0) < 0 or stop - start != _num_bytes(tensor):
        raise ValueError(f"tensor {name} has {stop - start} bytes, its shape wants {_num_bytes(tensor)}")
    return tensor


def _num_bytes(tensor: StoredTensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        found = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{index}: not a safetensors index ({error!r}); download it again") from error
    if not found:
        raise ArtifactError(f"{index}: an index that names no file; download it again")
    return found


def _read_into(file: int, data: memoryview, path: Path) -> None:
    # One read may return less than asked for (2 GB at most on Linux).
    while data:
        count = os.readv(file, [data])
        if count == 0:
            raise ArtifactError(f"{path} became shorter while it was read; nobody may write to it during a compile")
        data = data[count:]
