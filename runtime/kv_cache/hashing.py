"""The hashes under which blocks are found, of all tokens up to a block's end; they are equal on every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from inferc.runtime.step.plan import I32


def root_hash(model_hash: str, kv_dtype: str, adapter: str = "", salt: str = "") -> bytes:
    """Return the hash before a sequence's first block, of all that must be equal for two sequences to share K and V.

    It is SHA-256 over length-prefixed fields, so that other processes and machines compute the same.
    """
    digest = hashlib.sha256()
    for part in (model_hash, kv_dtype, adapter, salt):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def block_hash(previous: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the hash of a full block: of all tokens up to its end, through `previous`.

    Token ids enter as little-endian u32.
    """
    return hash_block(previous, np.asarray(token_ids, "<u4").tobytes())


def hash_block(previous: bytes, ids: bytes) -> bytes:
    """Return the `block_hash` of ids that are bytes already."""
    return hashlib.sha256(previous + ids).digest()


def extend_hashes(hashes: list[bytes], root: bytes, token_ids: Sequence[int] | I32, block_size: int) -> None:
    """Append the hashes of the full blocks of `token_ids` that `hashes` lacks; `root` is the sequence's `root_hash`."""
    first = len(hashes)
    ids = np.asarray(token_ids[first * block_size : len(token_ids) // block_size * block_size], "<u4").tobytes()
    name = hashes[-1] if hashes else root
    for begin in range(0, len(ids), 4 * block_size):
        name = hash_block(name, ids[begin : begin + 4 * block_size])
        hashes.append(name)
