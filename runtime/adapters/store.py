"""The adapters that an engine has loaded, by name, each with a number in the runner's table."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from inferc.errors import ConfigError, InfercError, RequestError, UnsupportedError, nearest
from inferc.ir.adapter_sites import Adapters
from inferc.runtime.adapters.arrange import ArrangedAdapter, arrange
from inferc.runtime.adapters.peft import TENSORS, read_peft

log = logging.getLogger(__name__)

MOST_ADAPTERS = 255  # loaded at a time
MAX_NAME = 256  # characters


@runtime_checkable
class AdapterRunner(Protocol):
    """A runner of a step with room for LoRA adapters."""

    def set_adapter(self, number: int, adapter: ArrangedAdapter | None) -> None:
        """Put an adapter into the table, or take the one with this number out.

        It is so for the steps that are submitted from now on.
        """


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter in the runner's table: its number there, and the digest of its files, by which blocks are cached."""

    name: str
    number: int
    digest: str
    path: str
    num_bytes: int


def parse_adapters(texts: Iterable[str]) -> dict[str, str]:
    """Return the adapters of `--adapter NAME=PATH`, path by name.

    Raises ConfigError for other texts, or a name twice.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or not name or not path:
            raise ConfigError(f"--adapter {text}: expected NAME=PATH, a name for clients and the folder of an adapter")
        check_name(name)
        if name in found:
            raise ConfigError(f"--adapter {text}: there is another adapter {name}; give each its own name")
        found[name] = path
    return found


def stored_bytes(texts: Iterable[str]) -> int:
    """Return the bytes of the files of adapters, about what they take in memory; of those that can be found."""
    files = (Path(path) / TENSORS for path in parse_adapters(texts).values())
    return sum(file.stat().st_size for file in files if file.is_file())


def check_name(name: str) -> None:
    """Raise ConfigError for what is no name of an adapter."""
    if not name or len(name) > MAX_NAME or not name.isprintable() or name != name.strip() or "=" in name:
        shown = name if len(name) <= MAX_NAME and name.isprintable() else f"of {len(name)} characters"
        raise ConfigError(f"the name of an adapter, {shown!r}: expected 1 to {MAX_NAME} printable characters, and no =")


def find_adapter(store: AdapterStore | None, name: str) -> tuple[str, int]:
    """Return the digest and the number of the adapter that a request names, ("", 0) for "".

    Raises RequestError for an unknown name, or an engine without adapters.
    """
    if not name:
        return "", 0
    if store is None:
        raise RequestError(f"adapter {name[:MAX_NAME]!r}: this engine takes no adapters; leave it out")
    found = store.find(name)
    return found.digest, found.number


@dataclass(frozen=True)
class _Read:
    request_id: str
    name: str
    path: str
    result: tuple[ArrangedAdapter, str] | InfercError
    seconds: float


class AdapterStore:
    """The loaded adapters of one engine, whose thread calls all methods; files are read on threads of their own.

    room: that of the compiled step; dtype: its dtype.
    """

    def __init__(self, runner: AdapterRunner, room: Adapters, dtype: str) -> None:
        self._runner, self._room, self._dtype = runner, room, dtype
        self._loaded: dict[str, LoadedAdapter] = {}
        self._leaving: dict[int, LoadedAdapter] = {}  # unloaded, with requests that are still open
        self._read: deque[_Read] = deque()
        self._reading: set[str] = set()
        self.wake: Callable[[], None] = lambda: None

    @property
    def loaded(self) -> Mapping[str, LoadedAdapter]:
        return self._loaded

    def find(self, name: str) -> LoadedAdapter:
        """Return the adapter of a name. Raises RequestError for an unknown one."""
        if (found := self._loaded.get(name)) is None:
            known = nearest(name, self._loaded) if self._loaded else "none is loaded"
            raise RequestError(f"there is no adapter {name[:MAX_NAME]!r}; {known}")
        return found

    def load(self, name: str, path: str) -> LoadedAdapter:
        """Load an adapter now. Raises InfercError for one that cannot be loaded."""
        self._check(name)
        begin = time.monotonic()
        return self._add(name, path, self._arranged(path), time.monotonic() - begin)

    def begin_load(self, request_id: str, name: str, path: str) -> None:
        """Begin to read an adapter; `take_read` has it or the error later. Raises RequestError for a name in use."""
        try:
            self._check(name)
        except InfercError as error:
            raise RequestError(str(error)) from None
        self._reading.add(name)
        args = (request_id, name, path)
        threading.Thread(target=self._read_late, args=args, name="inferc-adapter", daemon=True).start()

    def take_read(self) -> list[tuple[str, LoadedAdapter | InfercError]]:
        """Put the adapters that were read since the last call in place; return them, or errors, by request."""
        done: list[tuple[str, LoadedAdapter | InfercError]] = []
        while self._read:
            each = self._read.popleft()
            self._reading.discard(each.name)
            if isinstance(each.result, InfercError):
                done.append((each.request_id, each.result))
                continue
            try:
                done.append((each.request_id, self._add(each.name, each.path, each.result, each.seconds)))
            except InfercError as error:
                done.append((each.request_id, error))
        return done

    def unload(self, name: str, numbers_in_use: Iterable[int]) -> LoadedAdapter:
        """Take an adapter away: no new request may name it. Raises RequestError for an unknown name.

        numbers_in_use: the adapters of open requests. One among them leaves the memory when `release` finds it free.
        """
        found = self.find(name)
        del self._loaded[name]
        self._leaving[found.number] = found
        self.release(numbers_in_use)
        return found

    @property
    def has_leaving(self) -> bool:
        """True while open requests keep an adapter that was unloaded."""
        return bool(self._leaving)

    def release(self, numbers_in_use: Iterable[int]) -> None:
        """Free the memory of unloaded adapters that no open request has any more."""
        for number in self._leaving.keys() - set(numbers_in_use):
            left = self._leaving.pop(number)
            self._runner.set_adapter(number, None)
            log.info("adapter %s unloaded, %.1f MB", left.name, left.num_bytes / 1e6)

    def _check(self, name: str) -> None:
        check_name(name)
        if name in self._loaded or name in self._reading:
            raise ConfigError(f"there is an adapter {name!r} already; unload it first, or give this one another name")
        self._free_number()

    def _free_number(self) -> int:
        taken = {each.number for each in self._loaded.values()} | self._leaving.keys()
        for number in range(1, MOST_ADAPTERS + 1):
            if number not in taken:
                return number
        raise ConfigError(f"{MOST_ADAPTERS} adapters are loaded, the most at a time; unload one first")

    def _arranged(self, path: str) -> tuple[ArrangedAdapter, str]:
        read = read_peft(Path(path))
        return arrange(read, self._room, self._dtype), read.digest

    def _read_late(self, request_id: str, name: str, path: str) -> None:
        begin = time.monotonic()
        result: tuple[ArrangedAdapter, str] | InfercError
        try:
            result = self._arranged(path)
        except InfercError as error:
            result = error
        except MemoryError:
            result = UnsupportedError(f"{path}: not enough memory for this adapter")
        except Exception as error:
            log.exception("adapter %s cannot be read", name)
            result = InfercError(f"{path}: it cannot be read, by a mistake of our own: {type(error).__name__}")
        self._read.append(_Read(request_id, name, path, result, time.monotonic() - begin))
        self.wake()

    def _add(self, name: str, path: str, arranged: tuple[ArrangedAdapter, str], seconds: float) -> LoadedAdapter:
        adapter, digest = arranged
        loaded = LoadedAdapter(name, self._free_number(), digest, path, adapter.data.nbytes)
        self._runner.set_adapter(loaded.number, adapter)
        self._loaded[name] = loaded
        sites, rank = int((adapter.ranks > 0).sum()), int(adapter.ranks.max())
        facts = f"rank {rank} at {sites} places, {adapter.data.nbytes / 1e6:.1f} MB, {seconds:.2f} s"
        log.info("adapter %s: %s, %s", name, path, facts)
        return loaded
