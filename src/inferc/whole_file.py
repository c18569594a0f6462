"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from inferc.errors import ConfigError


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name to write to, which becomes `path` at the end of the block; whatever goes wrong, what is there stays.

    The name ends as `path` does. Raises ConfigError where the file cannot be written.
    """
    partial = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    finally:
        partial.unlink(missing_ok=True)
