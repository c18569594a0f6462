"""Compiled libraries, loaded from the bytes that were checked and not from a path a second time.

Between the check of a file and its opening by name somebody may put another there. So the bytes go to a file in memory that has
no name, is sealed (nobody writes to it again, we neither) and is what the dynamic loader opens.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

log = logging.getLogger(__name__)

MFD_EXEC = 0x10  # of Linux 6.3: says that the file is to be executed, which a system may ask for
_SEALS = ("F_SEAL_SEAL", "F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_WRITE")


@dataclass(frozen=True)
class Library:
    """The bytes of a compiled library. path: of the file that they were read from, for messages."""

    path: Path
    data: bytes = field(repr=False)

    @staticmethod
    def read(path: Path) -> Library:
        """A library of whose bytes nobody knows anything, as a compile has just written it. Raises OSError."""
        return Library(path, path.read_bytes())


# By the SHA-256 of their bytes: the loader would map the same bytes again, under another name.
_OPEN: dict[bytes, ctypes.CDLL] = {}
_LOCK = threading.Lock()


def open_library(library: Library) -> ctypes.CDLL:
    """Have the dynamic loader open these bytes. Raises OSError, with what the loader says, where it cannot."""
    digest = hashlib.sha256(library.data).digest()
    with _LOCK:
        if digest not in _OPEN:
            _OPEN[digest] = _open_sealed(library) or _open_copy(library)
        return _OPEN[digest]


def _open_sealed(library: Library) -> ctypes.CDLL | None:
    """From a file in memory; None where the system has none, or lets none be executed."""
    try:
        file = _new_file(f"inferc-{library.path.name}")
    except (OSError, AttributeError) as error:
        log.debug("no files in memory: %s", error)
        return None
    try:
        with open(file, "wb", closefd=False) as to:
            to.write(library.data)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, sum(getattr(fcntl, name) for name in _SEALS))
        # It stays open, so that its number, which is its name for the loader, is not given out again.
        return ctypes.CDLL(f"/proc/self/fd/{file}")
    except (OSError, AttributeError) as error:
        log.debug("%s is not loaded from a file in memory: %s", library.path, error)
        os.close(file)
        return None


def _new_file(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | MFD_EXEC)
    except OSError:  # a kernel that does not know the flag
        return os.memfd_create(name, flags)


def _open_copy(library: Library) -> ctypes.CDLL:
    """From a copy that nobody else can reach, in a folder of its own, which is gone once the loader has it."""
    try:
        folder = tempfile.mkdtemp(prefix="inferc-")  # mode 0700
    except OSError as error:
        return _open_itself(library, error)
    try:
        path = Path(folder) / f"{hashlib.sha256(library.data).hexdigest()}.so"  # never a name twice
        try:
            with path.open("xb") as to:
                to.write(library.data)
        except OSError as error:
            return _open_itself(library, error)
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            raise OSError(str(error).replace(str(path), str(library.path))) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _open_itself(library: Library, why: OSError) -> ctypes.CDLL:
    """Open the file that was checked, where no file can be written at all (a full disk, a limit on their size).

    By its descriptor, through which the bytes are compared before: another file under its name is not taken. Against somebody
    who writes into the file itself at this moment there is no help here, so it is said.
    """
    try:
        file = os.open(library.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        raise OSError(f"no copy of it can be written: {why.strerror}") from None
    try:
        with open(file, "rb", closefd=False) as whole:
            if whole.read() != library.data:
                raise OSError(f"it has changed since it was checked, and no copy can be written: {why.strerror}")
        opened = ctypes.CDLL(f"/proc/self/fd/{file}")  # which stays open, as above
    except OSError:
        os.close(file)
        raise
    log.warning("%s is loaded from where it is: no copy of it can be written (%s)", library.path, why.strerror)
    return opened
