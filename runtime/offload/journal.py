"""The journal of the KV cache's files: appended records of which block lies where, read by the next run.

A block's record is written after its bytes and holds their checksum; the record of the block that lay there before is
revoked before its bytes are overwritten. So neither a process that is killed nor a machine that loses power leaves a
block that is taken for another: a block that does not match its checksum is not used.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from inferc.system.atomic_file import atomic_write

log = logging.getLogger(__name__)

# magic, group, kind, place, name, checksum; a CRC-32 of these follows.
RECORD = struct.Struct("<4sHBxI32s16s")
RECORD_BYTES = RECORD.size + 4
MAGIC = b"ikv1"
COMMIT, DROP = 1, 2
# The file is rewritten when it has this many records more than twice the number of live blocks.
COMPACT_ABOVE = 1 << 16


@dataclass(frozen=True)
class Stored:
    """A block's hash, and the XXH3-128 checksum of its bytes."""

    name: bytes
    checksum: bytes


class Journal:
    """The journal of the blocks of all KV groups, kept in memory and in a file.

    live: the block at each (KV group, place), in the order in which they were stored.
    sizes: the number of places of each group; records of places beyond it are dropped.
    is_valid: False if the file's content must not be used.

    Raises OSError.
    """

    def __init__(self, path: Path, sizes: Sequence[int], is_valid: bool) -> None:
        self._path, self._file = path, -1
        self.live: dict[tuple[int, int], Stored] = {}
        if is_valid:
            self._read(path.read_bytes(), sizes)
        self._write_anew()

    def _read(self, data: bytes, sizes: Sequence[int]) -> None:
        damaged = int(len(data) % RECORD_BYTES > 0)
        for at in range(0, len(data) - RECORD_BYTES + 1, RECORD_BYTES):
            body, crc = data[at : at + RECORD.size], data[at + RECORD.size : at + RECORD_BYTES]
            magic, group, kind, place, name, checksum = RECORD.unpack(body)
            if magic != MAGIC or crc != _crc(body) or group >= len(sizes):
                damaged += 1
                continue
            self.live.pop((group, place), None)
            if kind == COMMIT and place < sizes[group]:
                self.live[group, place] = Stored(name, checksum)
        if damaged:
            log.warning("%s: %d of its records are damaged, and what they name is not used", self._path, damaged)

    def _write_anew(self) -> None:
        """Rewrite the file without the records of blocks that are not there any more."""
        with atomic_write(self._path, private=True) as partial, partial.open("wb") as file:
            for (group, place), stored in self.live.items():
                file.write(_record(group, COMMIT, place, stored))
        self.close()
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._num_records = len(self.live)

    def commit(self, group: int, place: int, stored: Stored) -> None:
        """Record which block lies at a place from now on."""
        self.live[group, place] = stored
        self._append(_record(group, COMMIT, place, stored))

    def take_back(self, group: int, place: int) -> None:
        """Record that the block at a place must not be used."""
        if self.live.pop((group, place), None) is not None:
            self._append(_record(group, DROP, place, Stored(b"", b"")))

    def _append(self, record: bytes) -> None:
        write_all(self._file, record)
        self._num_records += 1
        if self._num_records > 2 * len(self.live) + COMPACT_ABOVE:
            self._write_anew()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _record(group: int, kind: int, place: int, stored: Stored) -> bytes:
    body = RECORD.pack(MAGIC, group, kind, place, stored.name, stored.checksum)
    return body + _crc(body)


def _crc(body: bytes) -> bytes:
    return zlib.crc32(body).to_bytes(4, "little")


def write_all(file: int, data: bytes | memoryview, offset: int | None = None) -> None:
    """Write all of `data`, at an offset or at the end; raise OSError."""
    while len(data):
        count = os.write(file, data) if offset is None else os.pwrite(file, data, offset)
        data = data[count:]
        offset = None if offset is None else offset + count
