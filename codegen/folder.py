"""The output folder of a compile: written under another name, then put in place in one move, or not at all."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import secrets
import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

from inferc.errors import ConfigError
from inferc.manifest import MANIFEST, SIGNATURE
from inferc.system.json_text import parse_json

log = logging.getLogger(__name__)

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # constants of renameat2(2)
LOCK = "lock"


class OutputFolder:
    """A context in which `path` is a fresh folder beside `out`; `commit()` moves it to `out`, and leaving deletes it.

    `path` lies in a folder of its own with a file that stays locked while a process writes there: a process id would
    say nothing to a compile in another container, or on another machine. Entering raises ConfigError, before any work
    is done, if `out` cannot be written or is something else than an artifact: only an artifact is ever replaced, and
    only if every file in it is the artifact's own.
    """

    def __init__(self, out: Path) -> None:
        self.out = out.expanduser().resolve()
        self._prefix = f".{self.out.name}.partial-"
        # A name is never used twice: the dynamic loader takes a library at a known path for the one that it has loaded.
        self._partial = self.out.parent / f"{self._prefix}{secrets.token_hex(8)}"
        self._unlocked = self._partial.with_name(self._partial.name.replace(".partial-", ".new-"))
        self.path = self._partial / "artifact"
        self._lock: int | None = None
        self._made_parents: list[Path] = []

    def __enter__(self) -> Self:
        _check_replaceable(self.out)
        try:
            for parent in reversed([p for p in self._partial.parents if not p.exists()]):
                parent.mkdir()
                self._made_parents.append(parent)
            self._remove_leftovers()
            self._unlocked.mkdir()  # under a name that no other compile deletes before it is locked
            self._lock = _try_lock(self._unlocked)
            self._unlocked.rename(self._partial)
            self.path.mkdir()
        except OSError as error:
            self._leave()
            raise ConfigError(
                f"cannot write {self.out}: {error.strerror}; choose an output folder that you may write to"
            ) from None
        except BaseException:  # an interrupt, for example: __exit__ is not called if __enter__ raises
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def write(self, name: str, data: bytes | memoryview) -> Path:
        """Write one file, and make its folder if it is missing."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def commit(self) -> None:
        """Put the folder in place of `out` and of the artifact that may be there."""
        _check_replaceable(self.out)  # again: minutes may have passed
        if self.out.exists() and any(self.out.iterdir()):
            _exchange(self.path, self.out)
        else:
            self.path.rename(self.out)

    def _leave(self) -> None:
        """Delete everything but the committed artifact, and the folders made for it if they stayed empty."""
        for folder in (self._partial, self._unlocked):
            shutil.rmtree(folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        for parent in reversed(self._made_parents):
            if not any(parent.iterdir()):
                parent.rmdir()

    def _remove_leftovers(self) -> None:
        """Delete the folders that killed compiles of the same output left: those whose lock nobody holds."""
        for folder in self.out.parent.iterdir():
            if folder.name.startswith(self._prefix) and (lock := _try_lock(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _try_lock(folder: Path) -> int | None:
    """Lock the file LOCK of `folder`, making it; return None if it is held, or if files cannot be locked."""
    path = folder / LOCK
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:  # the folder is another user's, or just gone
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), path.stat()):  # the file was not deleted or replaced since it was opened
            return lock
    except OSError as error:
        log.debug("%s is not locked: %s", path, error.strerror)
    os.close(lock)
    return None


def _check_replaceable(out: Path) -> None:
    """Raise ConfigError unless `out` is absent, an empty folder, or an artifact without other files."""
    try:
        if not out.exists():
            return
        if not out.is_dir():
            raise ConfigError(f"{out} is a file; choose another output folder, or remove it")
        present = {str(path.relative_to(out)) for path in out.rglob("*") if not path.is_dir()}
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}; choose another output folder") from None
    if not present and not any(out.iterdir()):
        return
    try:
        manifest = parse_json((out / MANIFEST).read_bytes())
        own = {MANIFEST, SIGNATURE, *manifest["files"]} if manifest["producer"].startswith("inferc") else set()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        own = set()
    if not own:
        raise ConfigError(f"{out} exists and is not an inferc artifact; choose another output folder, or remove it")
    if present - own:
        extra = ", ".join(sorted(present - own)[:3])
        raise ConfigError(
            f"{out} is an artifact that also holds other files ({extra}); move them, or choose another output folder"
        )


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders in one system call, or by renames where the system has no such call."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
        if renameat2(AT_FDCWD, os.fsencode(new), AT_FDCWD, os.fsencode(old), RENAME_EXCHANGE) == 0:
            return
    except (AttributeError, TypeError):  # not Linux, or an older libc
        pass
    # A kill between these renames leaves the old artifact under a name that no compile deletes.
    aside = old.with_name(f"{old.name}.previous-{secrets.token_hex(4)}")
    old.rename(aside)
    new.rename(old)
    aside.rename(new)
