"""The creation of files and folders that only their owner can access, for data that reveals users' texts.

They are created with these permissions, whatever the umask is, so at no moment are they wider. What an earlier run left
with wider permissions is narrowed.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

FILE_MODE, FOLDER_MODE = 0o600, 0o700
OTHERS = 0o077


def open_private(path: Path | str, flags: int) -> int:
    """Open a file, creating it if it is not there, and return its descriptor; raise OSError."""
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
    """Create a folder and its missing parents, for the owner alone.

    is_ours False: a folder that a user names. Its parents must exist, and if it exists itself, its mode stays. Raises
    OSError.
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
