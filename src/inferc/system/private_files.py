"""Files and folders for their owner alone: what users' texts can be read from.

They are made so, whatever the umask is: at no moment are they wider. What an earlier run left wider is closed.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

FILE_MODE, FOLDER_MODE = 0o600, 0o700
OTHERS = 0o077


def open_private(path: Path | str, flags: int) -> int:
    """A descriptor of a file, which is made if it is not there. Raises OSError."""
    file = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        found = os.fstat(file)
        if stat.S_ISREG(found.st_mode) and found.st_mode & OTHERS and found.st_uid == os.geteuid():
            os.fchmod(file, FILE_MODE)
    except OSError:
        os.close(file)
        raise
    return file


def private_folder(path: Path, *, is_ours: bool = True) -> None:
    """Make a folder, and those above it that are missing. is_ours False: one that a user names, who sees to what is above
    it, and to its mode if it is there.

    Raises OSError.
    """
    for parent in reversed([each for each in path.parents if is_ours and not each.exists()]):
        parent.mkdir(FOLDER_MODE, exist_ok=True)
    try:
        path.mkdir(FOLDER_MODE)
    except FileExistsError:
        found = path.stat()
        if not stat.S_ISDIR(found.st_mode):
            raise
        if is_ours and found.st_mode & OTHERS and found.st_uid == os.geteuid():
            path.chmod(FOLDER_MODE)
