"""The cache of captured programs, in memory and on disk, so that the same kind of model is traced once.

A program is kept as text, because whoever gets one changes it. On disk it lies in `captures/` of INFERC_CACHE, under a
digest of all that it depends on: the model's config, class and tensors (but no weights), and the code that captures it,
which is that of transformers, of torch and of inferc.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import json
import logging
import re
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from inferc.errors import ConfigError
from inferc.frontend.checkpoint.load import Checkpoint
from inferc.ir import program as program_lib
from inferc.ir.program import Program
from inferc.system.atomic_file import atomic_write
from inferc.system.env import cache_dir, keeps_captures

log = logging.getLogger(__name__)

MOST_IN_MEMORY, MOST_ON_DISK = 32, 64  # programs


@dataclass
class CaptureCache:
    """The captured programs that are kept, each with whether it was checked against a copy of its model."""

    in_memory: OrderedDict[str, tuple[bool, str]] = field(default_factory=OrderedDict)

    def get(self, key: str | None, checked: bool) -> Program | None:
        """Return the program kept under `key`; None if there is none, or it was not checked and must be."""
        if key is None:
            return None
        if key not in self.in_memory:
            self._remember(key, _read(key))
        was_checked, text = self.in_memory.get(key, (False, ""))
        return program_lib.from_json(json.loads(text)) if text and was_checked >= checked else None

    def put(self, key: str | None, checked: bool, program: Program) -> None:
        """Keep a program; a key of None keeps nothing."""
        if key is not None:
            text = json.dumps(program_lib.to_json(program))
            self._remember(key, (checked, text))
            _write(key, checked, text)

    def _remember(self, key: str, found: tuple[bool, str] | None) -> None:
        if found is not None:
            self.in_memory[key] = found
            self.in_memory.move_to_end(key)
            if len(self.in_memory) > MOST_IN_MEMORY:
                self.in_memory.popitem(last=False)


def capture_key(checkpoint: Checkpoint, dtype: str, max_model_len: int | None) -> str | None:
    """Return the key under which a capture is kept: all that a program depends on.

    Values of weights and the folder's name are not part of it. The key is None, so that nothing is kept, for a module
    in memory, whose code may have changed, and where values matter too: they decide whether tensors that are both tied
    and stored stay tied.
    """
    if checkpoint.module is not None:
        return None
    if getattr(checkpoint.config, "tie_word_embeddings", False):
        tied = getattr(checkpoint.model_class, "_tied_weights_keys", None) or ()
        if any(re.search(f"{pattern}$", name) for pattern in tied for name in checkpoint.tensors):
            return None
    tensors = sorted((name, list(shape), str(kind)) for name, (shape, kind) in checkpoint.tensors.items())
    kind = checkpoint.model_class
    config = json.loads(checkpoint.config.to_json_string(use_diff=False))
    config.pop("_name_or_path", None)
    facts = [kind.__module__, kind.__qualname__, _source_of(kind), dtype, max_model_len, tensors, config, _code()]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _source_of(kind: type) -> str:
    """Return a digest of the file that defines a model's class."""
    try:
        return hashlib.sha256(Path(inspect.getfile(kind)).read_bytes()).hexdigest()
    except (OSError, TypeError):
        return ""


@cache
def _code() -> list[str]:
    """Return the versions of the libraries that capture a model, and a digest of inferc's own code for it."""
    import inferc

    package = Path(inferc.__file__).parent
    files = sorted(file for room in ("frontend", "ir") for file in (package / room).rglob("*.py"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    return [importlib.metadata.version("torch"), importlib.metadata.version("transformers"), digest]


def _folder() -> Path | None:
    """Return the cache's folder; None if there can be none, or is to be none."""
    if not keeps_captures():
        return None
    try:
        folder = cache_dir() / "captures"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return folder


def _read(key: str) -> tuple[bool, str] | None:
    folder = _folder()
    if folder is None:
        return None
    for checked in (True, False):
        file = folder / _name(key, checked)
        with suppress(OSError, ValueError):
            text = file.read_text()
            json.loads(text)  # a file that was cut short is no program
            file.touch()
            return checked, text
    return None


def _write(key: str, checked: bool, text: str) -> None:
    folder = _folder()
    if folder is None:
        return
    with suppress(ConfigError, OSError):
        with atomic_write(folder / _name(key, checked)) as partial:
            partial.write_text(text)
        files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime)
        for old in files[:-MOST_ON_DISK]:
            old.unlink(missing_ok=True)


def _name(key: str, checked: bool) -> str:
    return f"{key}{'-checked' if checked else ''}.json"
