"""The artifact's format, shared by its writer and its reader: file names, digests, stored element types.

The runtime imports this module, so it imports neither torch nor numpy.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
import xxhash
from msgspec import Meta, Struct

FORMAT_VERSION = 2
MANIFEST = "engine.json"
PROGRAM = "program.json"  # the program's file in an artifact with one program; with several ranks, each has its own
MTP = "mtp"  # the folder of the model's MTP layers: an artifact of a head, whose files are among those of the artifact
HEAD_IDS = "head/token_ids.bin"  # i32, the ids of the tokens that a head drafts, if they are not all
ONNX_MODEL = "model.onnx"
TENSORRT_PLAN = "tensorrt/engine.plan"
# The network that the plan was built from. With several plans, it holds the network of each by the plan's name.
TENSORRT_LAYERS = "tensorrt/layers.json"
CERTIFICATE = "certificate.json"
SIGNATURE = "signature.json"  # signatures of the artifact; not one of the manifest's files, as it signs these
COSTS = "graph/costs.json"  # the program's costs after each pass, which `inferc explain` reads
# PTX stands for PTX code where a chip's name is expected. RECORDS is the file of a folder's launch records.
PTX, RECORDS = "ptx", "records.json"
# The orders of addition. In the invariant order a row's result does not depend on the rest of the batch.
FAST, INVARIANT = "fast", "invariant"
PREFILL = "prefill"  # marks a launch that only steps with several new tokens of a sequence need
ADAPTED = "adapted"  # marks a launch that only steps need in which a sequence has a LoRA adapter
SHARED = "shared"  # marks a launch that only steps need in which a prefix is read once for several sequences
CUBLASLT = "cublaslt"  # NVIDIA's library of matrix products
ALIGNMENT = 64  # the alignment of every weight's first byte: a cache line, and the widest vector load
CHUNK_BYTES = 64 << 20  # the size of a chunk of a weight file; each chunk has its own digest

# dtype name -> (safetensors' name, bytes of an element)
STORED_DTYPES = {
    "float32": ("F32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int8": ("I8", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}


class Head(Struct, frozen=True):
    """The facts about a head that drafts for another model.

    hidden_size, num_layers: those of that model. inputs: the nodes of its step whose rows the head reads, in this
    order. own: the node of the head's step whose rows take their place when it goes on with a token of its own.
    num_logits: how many of the model's tokens it can draft.
    """

    kind: Literal["eagle3", "mtp"]
    hidden_size: Annotated[int, Meta(ge=1)]
    num_layers: Annotated[int, Meta(ge=1)]
    inputs: Annotated[list[str], Meta(min_length=1)]
    own: str
    num_logits: Annotated[int, Meta(ge=1)]


def segment_plan(name: str) -> str:
    """Return the file name of a segment's TensorRT plan."""
    return f"tensorrt/{name}.plan"


def align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def json_bytes(value: Any) -> bytes:
    """Return `value` as the JSON text of an artifact: indented for people, and the same bytes for equal values.

    A Struct is written in the order of its fields.
    """
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False, default=_of_struct)
    return (text + "\n").encode()


def _of_struct(value: object) -> Any:
    if not isinstance(value, msgspec.Struct):
        raise TypeError(f"an artifact's JSON holds no {type(value).__name__}")
    return msgspec.to_builtins(value)


def seal_manifest(manifest: Mapping[str, object]) -> bytes:
    """Return the bytes of engine.json: `manifest` as JSON whose last key is the SHA-256 of every byte before it."""
    return _seal(json_bytes(manifest).removesuffix(b"\n}\n"))


def is_sealed(data: bytes) -> bool:
    """Return whether the bytes are exactly what `seal_manifest` wrote."""
    return data == _seal(data[: -len(_seal(b""))])


def _seal(body: bytes) -> bytes:
    return body + b',\n "sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'


@dataclass
class ChunkDigests:
    """The XXH3-128 digests of each `CHUNK_BYTES` of a stream that arrives in pieces of any size."""

    digests: list[str] = field(default_factory=list)
    num_bytes: int = 0
    _open: Any = field(default_factory=xxhash.xxh3_128, repr=False)

    def update(self, data: memoryview) -> None:
        while len(data):
            room = CHUNK_BYTES - self.num_bytes % CHUNK_BYTES
            piece, data = data[:room], data[room:]
            self._open.update(piece)
            self.num_bytes += len(piece)
            if self.num_bytes % CHUNK_BYTES == 0:
                self._close()

    def finish(self) -> list[str]:
        if self.num_bytes % CHUNK_BYTES:
            self._close()
        return self.digests

    def _close(self) -> None:
        self.digests.append(self._open.hexdigest())
        self._open = xxhash.xxh3_128()
