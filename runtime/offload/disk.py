"""The lower tier of the KV cache in files, which a later run finds again.

Steps on a CPU read them by memory map, behind their own pool; blocks of a GPU come from there and are copied back. Of either
the page cache is the tier in this machine's memory.

DIR/<hash of what decides the bits>/
    tier.json     what decides them, and the sizes
    journal       what lies where: records of 64 bytes, appended
    group-N       blocks of KV group N, as they lie in the pool; sparse, of the size that the tier may have
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
from inferc.system.atomic_file import whole_file
from inferc.system.file_map import ReadAhead, read_whole
from inferc.system.json_text import parse_json
from inferc.system.private_files import open_private, private_folder

log = logging.getLogger(__name__)

FORMAT = 1
DEFAULT_BYTES = 16 << 30
SECONDS_PER_BYTE = 1e-9  # before anything was moved
Bytes = NDArray[np.uint8]
ReadBlock = Callable[[int, int, Bytes], None]  # a group's block of the arena, copied to memory here; raises InfercError


class DiskTier:
    """Files below `folder` for the blocks of one artifact, at most `size_bytes` of them, and a thread that moves them.

    identity: what decides the bits of a block; another one has files of its own. block_bytes: of each KV group.
    num_blocks: of each group. Raises ConfigError for a folder that cannot be used, or is in use, or a size too small.
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
        self._below: list[Bytes] = []  # the memory of each file: [blocks, bytes of one]
        self._first: list[int] = []  # the number of its first block, behind the arena's
        self._read: ReadBlock = _read_none
        self._num_layers: list[int] = []
        self._checksums: dict[tuple[int, int], bytes] = {}  # of what was copied, until it is committed
        self._rate = FadingMean(0.98)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._done: deque[Done] = deque()
        self._thread = threading.Thread(target=self._work, name="inferc-kv-disk", daemon=True)
        self._ahead = ReadAhead()

    @property
    def files(self) -> list[int]:
        """A file descriptor of each group's blocks."""
        return self._files

    def names(self, group: int) -> dict[int, bytes]:
        first = self._first[group]
        return {first + place: stored.name for (index, place), stored in self._journal.live.items() if index == group}

    def attach(self, memory: Sequence[Bytes], num_layers: Sequence[int]) -> None:
        """Begin to work on the pools of a runner: [blocks of the arena and of the files, block_bytes] of each group."""

        def read(group: int, block: int, to: Bytes) -> None:
            np.copyto(to, memory[group][block])

        self._first = [len(pool) - count for pool, count in zip(memory, self.num_blocks, strict=True)]
        self._below = [pool[first:] for pool, first in zip(memory, self._first, strict=True)]
        self._read, self._num_layers = read, list(num_layers)
        self._thread.start()

    def map_files(self) -> list[Bytes]:
        """The files in memory, to be read: [blocks, block_bytes] of each group."""
        self._below = [
            np.frombuffer(mmap.mmap(file, count * size, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8).reshape(count, size)
            for file, count, size in zip(self._files, self.num_blocks, self.block_bytes, strict=True)
        ]
        return self._below

    def attach_device(self, num_blocks: Sequence[int], read: ReadBlock) -> None:
        """Begin to work on the pools of a GPU, of so many blocks, which `read` copies from there; the files are mapped."""
        self._first, self._read, self._num_layers = list(num_blocks), read, [1] * len(num_blocks)
        self._thread.start()

    def close(self) -> None:
        """End what was asked for, and let others have the files."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()
        self._ahead.close()
        self._opened.close()
        self._below, self._read = [], _read_none

    # ------------------------------------------------------------------------------------------------ files

    def _sizes(self, size_bytes: int | Literal["auto"]) -> tuple[int, ...]:
        """As many blocks of each group: a sequence has as many of all that attend to everything."""
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
        with whole_file(about, private=True) as partial:
            partial.write_text(json.dumps(header, indent=1) + "\n")
        return Journal(path, self.num_blocks, is_valid)

    def _open_file(self, index: int) -> int:
        return open_private(self.folder / f"group-{index}", os.O_RDWR)

    def _size_file(self, index: int) -> None:
        """Sparse; where somebody has cut it zeros are read, which have no block's checksum."""
        os.ftruncate(self._files[index], self.num_blocks[index] * self.block_bytes[index])

    # ------------------------------------------------------------------------------------------------ moves

    @property
    def seconds_per_byte(self) -> float:
        return self._rate.value or SECONDS_PER_BYTE

    def copy(self, group: int, block: int, below: int) -> None:
        self._jobs.put(lambda: self._timed(self._copy, group, below, block))

    def commit(self, group: int, below: int, name: bytes) -> None:
        self._jobs.put(lambda: self._commit(group, below, name))

    def check(self, group: int, below: int) -> None:
        self._jobs.put(lambda: self._timed(self._check, group, below))

    def forget(self, group: int, below: int) -> None:
        self._jobs.put(lambda: self._journal.take_back(group, self._place(group, below)))

    def take_done(self) -> list[Done]:
        return [self._done.popleft() for _ in range(len(self._done))]

    def read_ahead(self, tables: Sequence[I32]) -> None:
        """Begin to read what a step will find in the files, layer by layer, if steps have been waiting for the disk."""
        if not self._ahead.is_needed():
            return
        spans: list[list[tuple[int, int]]] = []
        for table, below, first, layers in zip(tables, self._below, self._first, self._num_layers, strict=True):
            places = (np.unique(table[table >= first]) - first).tolist()
            size, base = below.shape[1] // layers, below.ctypes.data
            spans += [
                [(base + place * below.shape[1] + layer * size, size) for place in places] for layer in range(layers)
            ]
        self._ahead.read([span for layer in spans for span in layer])

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except OSError as error:  # of the journal: bytes without a record are of no use to later runs, that is all
                log.warning("%s: %s", self.folder, error.strerror or error)

    def _timed(self, move: Callable[..., str | None], group: int, below: int, *more: int) -> None:
        started = time.perf_counter()
        try:
            failure = move(group, below, *more)
        except OSError as error:
            failure = f"{self.folder}: {error.strerror or error}"
        except InfercError as error:  # of the device
            failure = str(error)
        if failure is None:
            self._rate.add((time.perf_counter() - started) / self.block_bytes[group])
        self._done.append(Done((group, below), failure))

    def _place(self, group: int, below: int) -> int:
        return below - self._first[group]

    def _copy(self, group: int, below: int, block: int) -> str | None:
        place, data = self._place(group, below), self._staging[group]
        self._read(group, block, data)  # which may change: what is written has the checksum in any case
        self._journal.take_back(group, place)
        write_all(self._files[group], data.data, place * self.block_bytes[group])
        self._checksums[group, place] = xxhash.xxh3_128_digest(data.data)
        return None

    def _commit(self, group: int, below: int, name: bytes) -> None:
        place = self._place(group, below)
        self._journal.commit(group, place, Stored(name, self._checksums.pop((group, place))))

    def _check(self, group: int, below: int) -> str | None:
        place, path = self._place(group, below), self.folder / f"group-{group}"
        data = self._below[group][place]
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
) -> DiskTier | None:
    """The offload tier of an artifact's KV cache, where the config asks for one.

    computed_by: what decides the bits of K and V, an instruction set or a chip; those of another are not found in it.
    """
    if config.kv_disk is None:
        return None
    model, kv_dtype = artifact.cache_identity(config.kv_evict)
    identity = {"model": model, "kv_dtype": kv_dtype, "isa": computed_by()}
    sizes = [artifact.block_size * group.bytes_per_token for group in groups]
    return DiskTier(Path(config.kv_disk), identity, sizes, config.kv_disk_bytes)
