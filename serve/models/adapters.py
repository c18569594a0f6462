"""The LoRA adapters of one served model: their names for clients, and the folder that more may be loaded from."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from inferc.errors import RequestError, shown
from inferc.runtime.adapters.peft import CONFIG, TENSORS
from inferc.runtime.adapters.store import parse_adapters
from inferc.serve.errors import AdaptersFixed

log = logging.getLogger(__name__)

Files: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ServedAdapter:
    """An adapter that clients may name as a model; `created`: seconds since 1970, when it was loaded.

    files: what `state_of_files` returned before it was loaded, of one that a client had loaded.
    """

    name: str
    path: Path
    created: int
    files: Files | None = None


class ServedAdapters:
    """The adapters that the engine of a model has loaded, or loads when it starts again."""

    def __init__(self, given: Iterable[str]) -> None:
        """Begin with those of the command line, each NAME=PATH."""
        now = int(time.time())
        self._given = parse_adapters(given)
        self._served = {name: ServedAdapter(name, Path(path), now) for name, path in self._given.items()}

    def __contains__(self, name: object) -> bool:
        return name in self._served

    def __iter__(self) -> Iterator[ServedAdapter]:
        return iter(list(self._served.values()))

    def __getitem__(self, name: str) -> ServedAdapter:
        return self._served[name]

    def add(self, name: str, path: Path, files: Files | None) -> None:
        """Add an adapter that the engine has loaded; files: as in ServedAdapter."""
        self._served[name] = ServedAdapter(name, path, int(time.time()), files)

    def remove(self, name: str) -> None:
        self._served.pop(name, None)
        self._given.pop(name, None)

    def options(self) -> list[str]:
        """Return what the engine loads when it starts, each NAME=PATH.

        One that a client had loaded, and whose files are gone or others since, is left out: the model and the others
        are served on.
        """
        for each in self:
            files = None if each.name in self._given else state_of_files(each.path)
            if each.name not in self._given and (files is None or files != each.files):
                what = "gone" if files is None else "others now; load it again"
                log.error("adapter %s is served no more: its files in %s are %s", each.name, each.path, what)
                self.remove(each.name)
        return [f"{each.name}={each.path}" for each in self]


def state_of_files(folder: Path) -> Files | None:
    """Return what tells whether an adapter's files were changed, or None if one cannot be found."""
    try:
        found = [(folder / name).stat() for name in (CONFIG, TENSORS)]
    except OSError:
        return None
    return tuple((each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns) for each in found)


def find_adapter(folder: Path | None, name: str) -> Path:
    """Return the folder of an adapter that a client names: below `folder`, from where clients may load any.

    name: its path there, or its whole path. Raises AdaptersFixed if there is no such folder, RequestError for a path
    outside of it or without an adapter.
    """
    if folder is None:
        raise AdaptersFixed(
            "this server was not told where adapters are that clients may load; start it with --adapter-folder DIR"
        )
    inside = folder.resolve()
    try:
        found = (inside / name).resolve()
    except (OSError, ValueError):
        found = inside
    if not name or found == inside or not found.is_relative_to(inside) or not (found / CONFIG).is_file():
        raise RequestError(f"there is no adapter {shown(name, 150)} in the folder of adapters; name one that is there")
    return found
