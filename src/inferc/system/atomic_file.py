"""The atomic writing of files: a file is written completely or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from inferc.errors import ConfigError
from inferc.system.private_files import open_private


@contextmanager
def atomic_write(path: Path, *, private: bool = False) -> Iterator[Path]:
    """Yield a temporary name to write to, which is renamed to `path` at the end of the block.

    If anything goes wrong, the file at `path` stays as it was. The temporary name ends as `path` does. private: make a
    file for its owner alone, whatever the mode of a file that was there. Raises ConfigError where the file cannot be
    written.
    """
    partial = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        if private:
            partial.unlink(missing_ok=True)
            os.close(open_private(partial, os.O_WRONLY | os.O_EXCL))
        yield partial
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    finally:
        partial.unlink(missing_ok=True)
