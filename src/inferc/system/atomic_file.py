"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from inferc.errors import ConfigError
from inferc.system.private_files import open_private


@contextmanager
def whole_file(path: Path, *, private: bool = False) -> Iterator[Path]:
    """A name to write to, which becomes `path` at the end of the block; whatever goes wrong, what is there stays.

    The name ends as `path` does. private: a file for its owner alone, whatever mode one that was there had. Raises ConfigError where the file cannot be written.
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
