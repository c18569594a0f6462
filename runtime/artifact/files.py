"""The files of an artifact: small ones are read and hashed whole, large ones mapped and hashed in chunks by threads.

Callers get the very bytes that were hashed, or the map whose pages were: no file is opened a second time by its name.
"""

from __future__ import annotations

import hashlib
import mmap
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import xxhash

from inferc.errors import ArtifactError
from inferc.manifest import CHUNK_BYTES, MANIFEST
from inferc.manifest_types import FileEntry

AGAIN = "copy the artifact again, or compile it again"
Algorithm = Literal["xxh3_128", "sha256"]


@dataclass(frozen=True)
class ChunkSums:
    """The digests of a mapped file, one for each CHUNK_BYTES of it."""

    algorithm: Algorithm
    of_chunks: tuple[str, ...]


def digest_of(data: bytes | memoryview, algorithm: Algorithm) -> str:
    """Return the digest of a chunk, in the notation of the manifest and of signatures."""
    return xxhash.xxh3_128_hexdigest(data) if algorithm == "xxh3_128" else hashlib.sha256(data).hexdigest()


def checked_path(folder: Path, name: str, num_bytes: int) -> Path:
    """Return the path of a file after checking its size. Raises ArtifactError."""
    path = folder / name
    try:
        size = path.stat().st_size
    except OSError:
        raise ArtifactError(f"{path} is missing, though {MANIFEST} names it; {AGAIN}") from None
    if size != num_bytes:
        kind = "truncated" if size < num_bytes else "too long"
        raise ArtifactError(f"{path} is {kind}: it has {size} bytes, expected {num_bytes}; {AGAIN}")
    return path


def read_checked(folder: Path, name: str, entry: FileEntry) -> bytes:
    """Read a file and check it against the SHA-256 in the manifest. Raises ArtifactError."""
    path = checked_path(folder, name, entry.bytes)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"cannot read {path}: {error.strerror}") from None
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise ArtifactError(f"{path} is damaged: its sha256 does not match {MANIFEST}; {AGAIN}")
    return data


def map_file(folder: Path, name: str, entry: FileEntry) -> mmap.mmap:
    """Map a file into memory without reading any of it yet. Raises ArtifactError."""
    path = checked_path(folder, name, entry.bytes)
    try:
        with path.open("rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # an empty file raises ValueError
        raise ArtifactError(f"cannot map {path}: {getattr(error, 'strerror', None) or error}") from None
    if len(memory) != entry.bytes:  # the file was replaced after its size was checked
        raise ArtifactError(f"{path} has {len(memory)} bytes, expected {entry.bytes}; {AGAIN}")
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the kernel may lack huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class WeightsCheck:
    """A check of mapped files in progress: threads hash the chunks, which also faults their pages in."""

    def __init__(
        self, folder: Path, maps: Mapping[str, mmap.mmap], sums: Mapping[str, ChunkSums], num_threads: int
    ) -> None:
        self._folder, self._maps = folder, maps
        self._chunks = _chunks(sums)
        self._lock = threading.Lock()
        self._error: Exception | None = None  # the first error; the remaining chunks are then left unchecked
        self._threads = [
            threading.Thread(target=self._run, name=f"verify-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Block until every chunk is checked; raise ArtifactError naming the file if one is damaged or unreadable."""
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while self._error is None:
                with self._lock:
                    chunk = next(self._chunks, None)
                if chunk is None:
                    return
                self._check(*chunk)
        except Exception as error:  # noqa: BLE001  (lost on a thread: `wait` would pass what nobody checked)
            self._error = self._error or error

    def _check(self, name: str, start: int, algorithm: Algorithm, digest: str) -> None:
        path = self._folder / name
        try:
            with memoryview(self._maps[name]) as whole, whole[start : start + CHUNK_BYTES] as data:
                found = digest_of(data, algorithm)
        except OSError as error:
            raise ArtifactError(f"cannot read {path}: {error.strerror}") from error
        if found != digest:
            raise damaged(path, start)


def damaged(path: Path, start: int) -> ArtifactError:
    """Return the error that says that the chunk of a file beginning at `start` is damaged."""
    return ArtifactError(f"{path} is damaged within bytes {start} to {start + CHUNK_BYTES}; {AGAIN}")


def _chunks(sums: Mapping[str, ChunkSums]) -> Iterator[tuple[str, int, Algorithm, str]]:
    """Yield (file, first byte, algorithm, digest) of every chunk, in the order in which a step reads them."""
    for name, each in sums.items():
        for index, digest in enumerate(each.of_chunks):
            yield name, index * CHUNK_BYTES, each.algorithm, digest
