"""The watch over the mapped files of a served artifact, which notices that one was truncated, changed or removed.

A step reads the weights directly from the memory mapping of their file. Reading a page that is no longer in the file
kills the engine with SIGBUS, and a page that was overwritten changes the next answer. So the sizes and times of the
files are compared from time to time, and a file that changed is hashed. The server reads it with `pread` to do so: it
must not touch a mapped page that may be gone.
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

PIECE_BYTES = 1 << 20  # size of one read while a file is hashed


@dataclass(frozen=True)
class FileFault:
    """A fault of an artifact's file.

    in_place: the running engine has this very file mapped, so it reads the damaged bytes and not those of before.
    """

    reason: str
    in_place: bool


@dataclass(frozen=True)
class _Identity:
    """The metadata of a file that differs once the file was replaced or written to."""

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
    """The mapped files of an artifact as they were when it was loaded; an engine is assumed to map these files."""

    def __init__(self, artifact: Artifact) -> None:
        self._folder, self._sums = artifact.path, artifact.sums
        self._sizes = {name: len(data) for name, data in artifact.maps.items()}
        self._known: dict[str, _Identity] = {}  # identities of the files that are unchanged as far as is known
        self._hashed: set[str] = set()  # names in `_known` whose contents were hashed here
        self._mapped: dict[str, tuple[int, int]] = {}  # device and inode of each file that the engine has mapped
        self._bad: dict[str, tuple[_Identity, str]] = {}  # files whose hash is wrong: identity then, and the reason
        self._lock = threading.Lock()  # lets one check run at a time
        for name in self._sums:
            with suppress(OSError):  # the file has just been removed: the first check reports it
                self._known[name] = _Identity.of(self._folder / name)
        self.mapped_anew()

    def fault(self, thorough: bool = False) -> FileFault | None:
        """Return a fault of the files if there is one, preferably one that the running engine reads.

        It reads the whole of each file that has changed; with `thorough`, also of each that was never hashed here.
        """
        with self._lock:
            faults = [fault for name in self._sums if (fault := self._look(name, thorough)) is not None]
        return min(faults, key=lambda fault: not fault.in_place, default=None)

    def mapped_anew(self) -> None:
        """Note that a new engine has mapped the files that are there now.

        This waits for the disk, but not for a check that is running.
        """
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
        except OSError:  # the file is gone, and the engine keeps its mapping of the old one
            return False
        return self._mapped.get(name) == (found.st_dev, found.st_ino)


def _check_sums(path: Path, sums: ChunkSums) -> None:
    """Raise ArtifactError for a file with a chunk that has changed, and OSError for a file that cannot be read."""
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
