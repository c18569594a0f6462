"""The loading of compiled libraries from the bytes that were checked, not from a path that is opened a second time.

Somebody may replace a file between its check and its opening by name. So the bytes are written to an anonymous file in
memory, which is sealed against any further writes, and the dynamic loader opens that file.
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

MFD_EXEC = 0x10  # Linux 6.3: declares the file executable, which a system may require
_SEALS = ("F_SEAL_SEAL", "F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_WRITE")


@dataclass(frozen=True)
class Library:
    """The bytes of a compiled library. path: the file that they were read from, for messages."""

    path: Path
    data: bytes = field(repr=False)

    @staticmethod
    def read(path: Path) -> Library:
        """Read a library without checking it, such as one that a compile has just written. Raises OSError."""
        return Library(path, path.read_bytes())


# The open libraries by the SHA-256 of their bytes. Without this, the loader would map the same bytes once per name.
_OPEN: dict[bytes, ctypes.CDLL] = {}
_LOCK = threading.Lock()


def open_library(library: Library) -> ctypes.CDLL:
    """Have the dynamic loader open these bytes. Raises OSError with the loader's message if it cannot."""
    digest = hashlib.sha256(library.data).digest()
    with _LOCK:
        if digest not in _OPEN:
            _OPEN[digest] = _open_sealed(library) or _open_copy(library)
        return _OPEN[digest]


def _open_sealed(library: Library) -> ctypes.CDLL | None:
    """Open a library from a sealed file in memory; None if the system has no such files or does not execute them."""
    try:
        file = _new_file(f"inferc-{library.path.name}")
    except (OSError, AttributeError) as error:
        log.debug("no files in memory: %s", error)
        return None
    try:
        with open(file, "wb", closefd=False) as to:
            to.write(library.data)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, sum(getattr(fcntl, name) for name in _SEALS))
        # The descriptor stays open: its number is the loader's name for the library, and must not be reused.
        return ctypes.CDLL(f"/proc/self/fd/{file}")
    except (OSError, AttributeError) as error:
        log.debug("%s is not loaded from a file in memory: %s", library.path, error)
        os.close(file)
        return None


def _new_file(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | MFD_EXEC)
    except OSError:  # the kernel does not know the flag
        return os.memfd_create(name, flags)


def _open_copy(library: Library) -> ctypes.CDLL:
    """Open a library from a copy in a private folder, which is deleted once the loader has opened it."""
    try:
        folder = tempfile.mkdtemp(prefix="inferc-")  # mode 0700
    except OSError as error:
        return _open_itself(library, error)
    try:
        path = Path(folder) / f"{hashlib.sha256(library.data).hexdigest()}.so"  # a unique name per content
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
    """Open the checked file itself, where no copy can be written at all (a full disk, a limit on file sizes).

    It is opened by a descriptor, through which its bytes are compared first, so another file under its name is not
    loaded. This cannot protect against somebody who writes into the file at this very moment, so a warning is logged.
    """
    try:
        file = os.open(library.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        raise OSError(f"no copy of it can be written: {why.strerror}") from None
    try:
        with open(file, "rb", closefd=False) as whole:
            if whole.read() != library.data:
                raise OSError(f"it has changed since it was checked, and no copy can be written: {why.strerror}")
        opened = ctypes.CDLL(f"/proc/self/fd/{file}")  # the descriptor stays open: its number is the library's name
    except OSError:
        os.close(file)
        raise
    log.warning("%s is loaded from where it is: no copy of it can be written (%s)", library.path, why.strerror)
    return opened
