"""The mapped files of a served artifact, beside what they were: cut short, overwritten, replaced or gone while it runs.

A step reads weights where the system maps their file. A page that is no longer in the file ends the engine by SIGBUS, and one that
was overwritten is in the next answer. So their sizes and times are looked at now and then, and a file that changed is hashed:
here by reading it, since the server itself must not touch a page that may not be there.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from inferc.errors import ArtifactError
from inferc.manifest import CHUNK_BYTES
from inferc.runtime.artifact.files import ChunkSums, checked_path, damaged, digest_of
from inferc.runtime.artifact.load import Artifact

PIECE_BYTES = 1 << 20  # read at once


@dataclass(frozen=True)
class FileFault:
    """What is wrong with a file. in_place: an engine that runs reads it, and not what lay there before."""

    reason: str
    in_place: bool


@dataclass(frozen=True)
class _Identity:
    """What changes with a file: it is another one, or somebody has written to it."""

    device: int
    inode: int
    num_bytes: int
    written_ns: int
    changed_ns: int

    @staticmethod
    def of(path: Path) -> _Identity:
        found = path.stat()
        return _Identity(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class ArtifactWatch:
    """The mapped files of an artifact, as they were when it was loaded; what an engine maps is taken to be these."""

    def __init__(self, artifact: Artifact) -> None:
        self._folder, self._sums = artifact.path, artifact.sums
        self._sizes = {name: len(data) for name, data in artifact.maps.items()}
        self._known: dict[str, _Identity] = {}  # of files that are as they were, as far as anybody knows
        self._hashed: set[str] = set()  # of those, the ones that were hashed here
        self._mapped: dict[str, tuple[int, int]] = {}  # device and inode of what an engine reads
        self._bad: dict[str, tuple[_Identity, str]] = {}  # files that were hashed and are not as they were, and why
        self._lock = threading.Lock()  # one look at a time
        for name in self._sums:
            with suppress(OSError):  # it has just gone: the first look says so
                self._known[name] = _Identity.of(self._folder / name)
        self.mapped_anew()

    def fault(self, thorough: bool = False) -> FileFault | None:
        """What is wrong now, if anything; waits for the disk where a file has changed, or thorough, was never hashed."""
        with self._lock:
            faults = [fault for name in self._sums if (fault := self._look(name, thorough)) is not None]
        return min(faults, key=lambda fault: not fault.in_place, default=None)

    def mapped_anew(self) -> None:
        """An engine has been started, of the files that are there now. Waits for the disk, and for no look."""
        mapped = {}
        for name in self._sums:
            with suppress(OSError):
                found = (self._folder / name).stat()
                mapped[name] = (found.st_dev, found.st_ino)
        self._mapped = mapped

    def _look(self, name: str, thorough: bool) -> FileFault | None:
        path = self._folder / name
        try:
            checked_path(self._folder, name, self._sizes[name])
            found = _Identity.of(path)
            if found == self._known.get(name) and not (thorough and name not in self._hashed):
                return None
            identity, reason = self._bad.get(name, (None, ""))
            if found == identity:
                return FileFault(reason, self._is_mapped(name))
            try:
                _check_sums(path, self._sums[name])
            except ArtifactError as error:
                self._bad[name] = (found, str(error))
                raise
            self._known[name] = found
            self._hashed.add(name)
        except ArtifactError as error:
            return FileFault(str(error), self._is_mapped(name))
        except OSError as error:
            return FileFault(f"cannot read {path}: {error.strerror}", self._is_mapped(name))
        return None

    def _is_mapped(self, name: str) -> bool:
        try:
            found = (self._folder / name).stat()
        except OSError:  # an engine keeps what it has mapped
            return False
        return self._mapped.get(name) == (found.st_dev, found.st_ino)


def _check_sums(path: Path, sums: ChunkSums) -> None:
    """Raises ArtifactError for a file of which a chunk is not as it was, OSError for one that cannot be read."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        memory = memoryview(bytearray(CHUNK_BYTES))
        for index, digest in enumerate(sums.of_chunks):
            start, size = index * CHUNK_BYTES, 0
            while count := os.preadv(file, [memory[size : size + PIECE_BYTES]], start + size):
                size += count
                if size == CHUNK_BYTES:
                    break
            if digest_of(memory[:size], sums.algorithm) != digest:
                raise damaged(path, start)
    finally:
        os.close(file)
