"""The offload tier of the KV cache in files, which a later run finds again.

Steps on a CPU read the files by memory map, behind their own pool; blocks of a GPU are copied to the files and back. In
both cases the page cache keeps the tier in this machine's memory.

  DIR/<hash of what decides the bits>/
      tier.json     what decides the bits, and the sizes
      journal       which block lies where: records of 64 bytes, appended
      group-N       blocks of KV group N, as they lie in the pool; sparse, with the size that the tier may have
      lock          held by the engine that uses it
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import mmap
import os
import queue
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from inferc.config import EngineConfig
from inferc.errors import ConfigError, InfercError
from inferc.kv_groups import CacheGroup
from inferc.runtime.artifact.load import Artifact
from inferc.runtime.kv_cache.block_pool import MOVING
from inferc.runtime.offload.journal import Journal, Stored, write_all
from inferc.runtime.offload.manager import Done
from inferc.runtime.step.cost import FadingMean
from inferc.runtime.step.plan import I32
from inferc.system.atomic_file import atomic_write
from inferc.system.file_map import ReadAhead, read_whole
from inferc.system.json_text import parse_json
from inferc.system.private_files import open_private, private_folder

log = logging.getLogger(__name__)

FORMAT = 1
DEFAULT_BYTES = 16 << 30
SECONDS_PER_BYTE = 1e-9  # the estimate before anything was moved
Bytes = NDArray[np.uint8]
# A function (group, block, to) that copies a block of the arena to memory here; it raises InfercError.
ReadBlock = Callable[[int, int, Bytes], None]


class DiskStore:
    """The files below `folder` for the blocks of one artifact, of at most `size_bytes`, and a thread that moves blocks.

    identity: what decides the bits of a block; each identity has files of its own.
    block_bytes: the size of a block of each KV group.
    num_blocks: the number of blocks of each group.

    Raises ConfigError for a folder that cannot be used, or is in use, or a size that is too small.
    """

    def __init__(
        self, folder: Path, identity: Mapping[str, Any], block_bytes: Sequence[int], size_bytes: int | Literal["auto"]
    ) -> None:
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        self.folder = folder / digest[:16]
        self.block_bytes = tuple(block_bytes)
        try:
            with ExitStack() as opened:
                private_folder(self.folder)
                opened.callback(os.close, _lock(self.folder / "lock"))
                self.num_blocks = self._sizes(size_bytes)
                self._files: list[int] = []
                for index in range(len(block_bytes)):
                    self._files.append(self._open_file(index))
                    opened.callback(os.close, self._files[-1])
                    self._size_file(index)
                self._journal = self._open_journal(identity)
                opened.callback(self._journal.close)
                self._opened = opened.pop_all()
        except OSError as error:
            raise ConfigError(
                f"--kv-disk {folder}: {error.strerror or error}; give a folder on a local disk that can be written to"
            ) from None
        self._staging = [np.zeros(size, np.uint8) for size in block_bytes]
        self._stored: list[Bytes] = []  # the memory of each file: [blocks, block_bytes]
        self._first: list[int] = []  # the number of each file's first block, behind the arena's
        self._read: ReadBlock = _read_none
        self._num_layers: list[int] = []
        self._checksums: dict[tuple[int, int], bytes] = {}  # of copied blocks, until they are committed
        self._rate = FadingMean(0.98)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._done: deque[Done] = deque()
        self._thread = threading.Thread(target=self._work, name="inferc-kv-disk", daemon=True)
        self._ahead = ReadAhead()

    @property
    def files(self) -> list[int]:
        """The file descriptors of the groups' blocks."""
        return self._files

    def names(self, group: int) -> dict[int, bytes]:
        first = self._first[group]
        return {first + place: stored.name for (index, place), stored in self._journal.live.items() if index == group}

    def attach(self, memory: Sequence[Bytes], num_layers: Sequence[int]) -> None:
        """Begin to work on the pools of a runner: [blocks of the arena and of the files, block_bytes] of each group."""

        def read(group: int, block: int, to: Bytes) -> None:
            np.copyto(to, memory[group][block])

        self._first = [len(pool) - count for pool, count in zip(memory, self.num_blocks, strict=True)]
        self._stored = [pool[first:] for pool, first in zip(memory, self._first, strict=True)]
        self._read, self._num_layers = read, list(num_layers)
        self._thread.start()

    def map_files(self) -> list[Bytes]:
        """Map the files to memory for reading: [blocks, block_bytes] of each group."""
        self._stored = [
            np.frombuffer(mmap.mmap(file, count * size, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8).reshape(count, size)
            for file, count, size in zip(self._files, self.num_blocks, self.block_bytes, strict=True)
        ]
        return self._stored

    def attach_device(self, num_blocks: Sequence[int], read: ReadBlock) -> None:
        """Begin to work on the pools of a GPU with `num_blocks` blocks, which `read` copies from there.

        The files must be mapped.
        """
        self._first, self._read, self._num_layers = list(num_blocks), read, [1] * len(num_blocks)
        self._thread.start()

    def close(self) -> None:
        """Finish the queued work, and release the files for other engines."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()
        self._ahead.close()
        self._opened.close()
        self._stored, self._read = [], _read_none

    # ------------------------------------------------------------------------------------------------ files

    def _sizes(self, size_bytes: int | Literal["auto"]) -> tuple[int, ...]:
        """Return the number of blocks of each group, which is the same for all.

        A sequence has equally many blocks of all groups with full attention.
        """
        each = sum(self.block_bytes)
        if size_bytes != "auto":
            size = size_bytes
        else:
            there = sum(path.stat().st_blocks * 512 for path in self.folder.iterdir())
            size = min(DEFAULT_BYTES, (shutil.disk_usage(self.folder).free + there) // 2)
        count = min(size // each, 2**31 // 2)
        if count <= MOVING:
            raise ConfigError(
                f"--kv-disk-size {size} holds {count} blocks of {each} bytes, expected {MOVING + 1} or more;"
                f" give {each * (MOVING + 1)} at least"
            )
        return (count,) * len(self.block_bytes)

    def _open_journal(self, identity: Mapping[str, Any]) -> Journal:
        header = {"format": FORMAT, "identity": dict(identity), "block_bytes": list(self.block_bytes)}
        path, about = self.folder / "journal", self.folder / "tier.json"
        is_valid = path.exists() and _read_json(about) == header
        if path.exists() and not is_valid:
            log.warning("%s is damaged or of another version of inferc: the KV cache on disk begins empty", about)
        with atomic_write(about, private=True) as partial:
            partial.write_text(json.dumps(header, indent=1) + "\n")
        return Journal(path, self.num_blocks, is_valid)

    def _open_file(self, index: int) -> int:
        return open_private(self.folder / f"group-{index}", os.O_RDWR)

    def _size_file(self, index: int) -> None:
        """Set the file's size, which leaves it sparse.

        A part that was cut off reads as zeros, which match no block's checksum.
        """
        os.ftruncate(self._files[index], self.num_blocks[index] * self.block_bytes[index])

    # ------------------------------------------------------------------------------------------------ moves

    @property
    def seconds_per_byte(self) -> float:
        return self._rate.value or SECONDS_PER_BYTE

    def copy(self, group: int, block: int, stored_block: int) -> None:
        self._jobs.put(lambda: self._timed(self._copy, group, stored_block, block))

    def commit(self, group: int, stored_block: int, name: bytes) -> None:
        self._jobs.put(lambda: self._commit(group, stored_block, name))

    def check(self, group: int, stored_block: int) -> None:
        self._jobs.put(lambda: self._timed(self._check, group, stored_block))

    def forget(self, group: int, stored_block: int) -> None:
        self._jobs.put(lambda: self._journal.take_back(group, self._place(group, stored_block)))

    def take_done(self) -> list[Done]:
        return [self._done.popleft() for _ in range(len(self._done))]

    def read_ahead(self, tables: Sequence[I32]) -> None:
        """Begin to read the file blocks that a step needs, layer by layer, if steps have waited for the disk."""
        if not self._ahead.is_needed():
            return
        spans: list[list[tuple[int, int]]] = []
        for table, stored, first, layers in zip(tables, self._stored, self._first, self._num_layers, strict=True):
            places = (np.unique(table[table >= first]) - first).tolist()
            size, base = stored.shape[1] // layers, stored.ctypes.data
            spans += [
                [(base + place * stored.shape[1] + layer * size, size) for place in places] for layer in range(layers)
            ]
        self._ahead.read([span for layer in spans for span in layer])

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            # The journal cannot be written: bytes without a record are only of no use to later runs.
            except OSError as error:
                log.warning("%s: %s", self.folder, error.strerror or error)

    def _timed(self, move: Callable[..., str | None], group: int, stored_block: int, *more: int) -> None:
        started = time.perf_counter()
        try:
            failure = move(group, stored_block, *more)
        except OSError as error:
            failure = f"{self.folder}: {error.strerror or error}"
        except InfercError as error:  # the device failed
            failure = str(error)
        if failure is None:
            self._rate.add((time.perf_counter() - started) / self.block_bytes[group])
        self._done.append(Done((group, stored_block), failure))

    def _place(self, group: int, stored_block: int) -> int:
        return stored_block - self._first[group]

    def _copy(self, group: int, stored_block: int, block: int) -> str | None:
        place, data = self._place(group, stored_block), self._staging[group]
        # The block may change meanwhile; the checksum is of the bytes that are written in any case.
        self._read(group, block, data)
        self._journal.take_back(group, place)
        write_all(self._files[group], data.data, place * self.block_bytes[group])
        self._checksums[group, place] = xxhash.xxh3_128_digest(data.data)
        return None

    def _commit(self, group: int, stored_block: int, name: bytes) -> None:
        place = self._place(group, stored_block)
        self._journal.commit(group, place, Stored(name, self._checksums.pop((group, place))))

    def _check(self, group: int, stored_block: int) -> str | None:
        place, path = self._place(group, stored_block), self.folder / f"group-{group}"
        data = self._stored[group][place]
        if (failure := read_whole(data.ctypes.data, len(data))) is not None:
            return f"{path}, block {place}: {failure}"
        stored = self._journal.live.get((group, place))
        if stored is None or xxhash.xxh3_128_digest(data.data) != stored.checksum:
            return f"{path}, block {place}: its checksum does not match"
        return None


def _read_none(group: int, block: int, to: Bytes) -> None:
    raise InfercError("no pool is attached")


def _lock(path: Path) -> int:
    file = open_private(path, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise ConfigError(
            f"--kv-disk {path.parent.parent} is in use by another engine; give each a folder of its own"
        ) from None
    return file


def _read_json(path: Path) -> Any:
    try:
        return parse_json(path.read_bytes())
    except (OSError, ValueError):
        return None


def open_disk(
    artifact: Artifact, config: EngineConfig, groups: Sequence[CacheGroup], computed_by: Callable[[], str]
) -> DiskStore | None:
    """Open the offload tier of an artifact's KV cache if the config asks for one.

    computed_by: what decides the bits of K and V: an instruction set or a chip. Blocks of another one are not found.
    """
    if config.kv_disk is None:
        return None
    model, kv_dtype = artifact.cache_identity(config.kv_evict)
    identity = {"model": model, "kv_dtype": kv_dtype, "isa": computed_by()}
    sizes = [artifact.block_size * group.bytes_per_token for group in groups]
    return DiskStore(Path(config.kv_disk), identity, sizes, config.kv_disk_bytes)
