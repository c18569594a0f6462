"""Safetensors files: their headers, checked against the files' sizes, and rows of their tensors.

A checkpoint is read a chunk of rows at a time and never as a whole; nothing here unpickles anything.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inferc.errors import ArtifactError, UnsupportedError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
INDEX_NAME = "model.safetensors.index.json"
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
    """Where one tensor lies: bytes [start, start + its size) of `file`."""

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
        """Rows [start, stop) of axis 0 of tensor `name`, in the dtype it is stored in; a copy."""
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
    """A TensorReader over tensors in memory: those of a module."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.state = {name: tensor.detach() for name, tensor in state.items()}

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self.state.items()}

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        rows: Tensor = self.state[name][start:stop]
        return rows.cpu()


def read_folder(folder: Path) -> SafetensorsReader:
    """The tensors of the safetensors files of a Hugging Face folder.

    Raises UnsupportedError for pickled weights, ArtifactError for weights that are missing, truncated or damaged.
    """
    stored: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        stored.update(read_header(path))
    index = folder / INDEX_NAME
    if index.is_file():
        for name, file in _weight_map(index).items():
            if name not in stored or stored[name].file.name != file:
                raise ArtifactError(
                    f"{index} puts tensor {name} in {file}, which does not hold it; download both again"
                )
    return SafetensorsReader(stored)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder, all there."""
    index, single = folder / INDEX_NAME, folder / "model.safetensors"
    if index.is_file():
        names = sorted(set(_weight_map(index).values()))
        for name in names:
            # An index comes with the checkpoint: it may name files beside itself only.
            if Path(name).name != name or not (folder / name).is_file():
                raise ArtifactError(f"{index} lists {name}, which is not in {folder}; download the missing file")
        return [folder / name for name in names]
    if single.is_file():
        return [single]
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickled:
        raise UnsupportedError(
            f"{folder}: weights are pickled ({pickled[0]}) and a pickle can run any code; expected model.safetensors:"
            " convert with transformers (from_pretrained, then save_pretrained)"
        )
    raise ArtifactError(f"{folder}: no model.safetensors and no {INDEX_NAME}; download the weights too")


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, each within the file and of the size its shape wants."""
    size = path.stat().st_size
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
        return {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{index}: not a safetensors index ({error!r}); download it again") from error


def _read_into(file: int, data: memoryview, path: Path) -> None:
    # One read may return less than asked for (2 GB at most on Linux).
    while data:
        count = os.readv(file, [data])
        if count == 0:
            raise ArtifactError(f"{path} became shorter while it was read; nobody may write to it during a compile")
        data = data[count:]
