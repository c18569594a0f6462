"""The output folder of a compile: written under another name, put in place in one move, or not at all."""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import shutil
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from inferc.errors import ConfigError
from inferc.manifest import MANIFEST

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of renameat2(2)


class OutputFolder:
    """A context in which `path` is a fresh folder beside `out`; `commit()` makes it `out`, leaving without deletes it.

    Entering raises ConfigError, before any work is done, if `out` cannot be written or is something else than an
    artifact: only an artifact is ever replaced, and only if every file in it is the artifact's own.
    """

    def __init__(self, out: Path) -> None:
        self.out = out.expanduser().resolve()
        self._prefix = f".{self.out.name}.partial-"
        # Never a name twice: the loader takes a library at a path that it knows for the one it has loaded.
        self.path = self.out.parent / f"{self._prefix}{os.getpid()}-{secrets.token_hex(4)}"
        self._made_parents: list[Path] = []

    def __enter__(self) -> Self:
        _check_replaceable(self.out)
        try:
            for parent in reversed([p for p in self.path.parents if not p.exists()]):
                parent.mkdir()
                self._made_parents.append(parent)
            self._remove_leftovers()
            self.path.mkdir()
        except OSError as error:
            self._remove_made_parents()
            raise ConfigError(
                f"cannot write {self.out}: {error.strerror}; choose an output folder that you may write to"
            ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.path.exists():
            shutil.rmtree(self.path, ignore_errors=True)
            self._remove_made_parents()

    def write(self, name: str, data: bytes) -> Path:
        """Write one file, making its folder."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def commit(self) -> None:
        """Put the folder in place of `out`, whatever artifact was there."""
        _check_replaceable(self.out)  # again: minutes may have passed
        if self.out.exists() and any(self.out.iterdir()):
            _exchange(self.path, self.out)
            shutil.rmtree(self.path)
        else:
            self.path.rename(self.out)

    def _remove_leftovers(self) -> None:
        """Delete what a killed compile of the same output left behind."""
        for folder in self.out.parent.iterdir():
            if folder.name.startswith(self._prefix):
                pid = folder.name.removeprefix(self._prefix).partition("-")[0]
                if pid.isdigit() and not Path(f"/proc/{pid}").exists():
                    shutil.rmtree(folder)

    def _remove_made_parents(self) -> None:
        for parent in reversed(self._made_parents):
            if not any(parent.iterdir()):
                parent.rmdir()


def _check_replaceable(out: Path) -> None:
    """Raise ConfigError unless `out` is absent, an empty folder, or an artifact and nothing more."""
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
        manifest = json.loads((out / MANIFEST).read_bytes())
        own = {MANIFEST, *manifest["files"]} if manifest["producer"].startswith("inferc") else set()
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
    """Swap two folders in one system call, or in two renames where the system has none."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
        if renameat2(AT_FDCWD, os.fsencode(new), AT_FDCWD, os.fsencode(old), RENAME_EXCHANGE) == 0:
            return
    except (AttributeError, TypeError):  # not Linux, or an older libc
        pass
    aside = new.with_name(new.name + "-old")
    old.rename(aside)
    new.rename(old)
    aside.rename(new)
