"""The files of the KV cache's offload tier: what a later run finds, and what it does not trust."""

from __future__ import annotations

import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from inferc.errors import ConfigError
from inferc.runtime.offload.disk import DiskStore
from inferc.runtime.offload.journal import RECORD_BYTES, Journal, Stored
from inferc.runtime.offload.manager import Done
from inferc.runtime.runners.cpu.runner import _allocate_pool

BLOCK, ARENA, COUNT = 5120, 4, 12  # no multiple of a page
IDENTITY = {"model": "m", "isa": "avx2"}


class Tier:
    """A tier and the pool of a runner that it works on."""

    def __init__(self, folder: Path, identity: dict[str, str] = IDENTITY, count: int = COUNT) -> None:
        self.disk = DiskStore(folder, identity, [BLOCK], count * BLOCK)
        pool = _allocate_pool(ARENA, BLOCK, (self.disk.files[0], count), poison=False)
        self.blocks = pool.reshape(-1, BLOCK)
        self.disk.attach([self.blocks], [2])

    def settle(self) -> None:
        """Wait until the tier's thread has done what it was given so far, which it does in order."""
        settled = threading.Event()
        self.disk._jobs.put(settled.set)
        assert settled.wait(10), "the thread does not come to it"

    def wait(self) -> Done:
        self.settle()
        (done,) = self.disk.take_done()
        return done

    def store(self, place: int, value: int, name: bytes) -> Done:
        self.blocks[1] = value
        self.disk.copy(0, 1, ARENA + place)
        done = self.wait()
        if done.failure is None:
            self.disk.commit(0, ARENA + place, name)
        return done

    def check(self, place: int) -> str | None:
        self.disk.check(0, ARENA + place)
        return self.wait().failure


@contextmanager
def opened(folder: Path, identity: dict[str, str] = IDENTITY, count: int = COUNT) -> Iterator[Tier]:
    tier = Tier(folder, identity, count)
    try:
        yield tier
    finally:
        tier.disk.close()


def files(folder: Path) -> Path:
    (inner,) = [path for path in folder.iterdir() if path.is_dir()]
    return inner


A, B, C = (bytes([value]) * 32 for value in (1, 2, 3))


def test_what_was_stored_is_read_in_place_and_found_by_the_next_run(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        assert tier.disk.names(0) == {}
        assert tier.store(3, 7, A) == Done((0, ARENA + 3))
        assert tier.store(0, 8, B).failure is None
        assert (tier.blocks[ARENA + 3] == 7).all() and (tier.blocks[ARENA] == 8).all()
        assert 0 < tier.disk.seconds_per_byte < 1e-3
    with opened(tmp_path) as tier:
        assert list(tier.disk.names(0).items()) == [(ARENA + 3, A), (ARENA, B)], "in the order in which they came"
        assert tier.check(3) is None and tier.check(0) is None
        assert (tier.blocks[ARENA + 3] == 7).all()
        tier.disk.forget(0, ARENA)
        tier.store(3, 9, C)
    with opened(tmp_path) as tier:
        assert tier.disk.names(0) == {ARENA + 3: C}


def test_a_copy_that_is_not_committed_is_found_by_nobody(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        tier.store(3, 7, A)
        tier.disk.copy(0, 1, ARENA + 3)
        tier.wait()
    with opened(tmp_path) as tier:
        assert tier.disk.names(0) == {}


def test_what_decides_the_bits_has_files_of_its_own(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        tier.store(3, 7, A)
    with opened(tmp_path, {**IDENTITY, "isa": "avx512"}) as tier:
        assert tier.disk.names(0) == {}
    with opened(tmp_path) as tier:
        assert tier.disk.names(0) == {ARENA + 3: A}


def test_bytes_that_changed_fail_their_check(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        tier.store(3, 7, A)
        tier.store(4, 7, B)
    with (files(tmp_path) / "group-0").open("r+b") as file:
        file.seek(3 * BLOCK + 100)
        file.write(b"x")
    with opened(tmp_path) as tier:
        assert "block 3: its checksum does not match" in (tier.check(3) or "")
        assert tier.check(4) is None


def test_a_file_that_was_cut_reads_as_damaged(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        tier.store(3, 7, A)
    os.truncate(files(tmp_path) / "group-0", BLOCK)
    with opened(tmp_path) as tier:
        assert "its checksum does not match" in (tier.check(3) or "")


def test_damaged_records_are_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as tier:
        for place, name in enumerate((A, B, C)):
            tier.store(place, place, name)
    journal = files(tmp_path) / "journal"
    data = bytearray(journal.read_bytes())
    assert len(data) == 3 * RECORD_BYTES
    data[RECORD_BYTES + 20] ^= 1
    journal.write_bytes(data + b"torn")
    with opened(tmp_path) as tier:
        assert list(tier.disk.names(0).values()) == [A, C]
    assert "2 of its records are damaged" in caplog.text
    with opened(tmp_path) as tier:
        assert list(tier.disk.names(0).values()) == [A, C]


def test_files_of_another_form_begin_anew_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as tier:
        tier.store(0, 1, A)
    (files(tmp_path) / "tier.json").write_text("{}")
    with opened(tmp_path) as tier:
        assert tier.disk.names(0) == {}
    assert "the KV cache on disk begins empty" in caplog.text


def test_a_smaller_size_gives_up_what_lies_behind_it(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        tier.store(2, 1, A)
        tier.store(11, 1, B)
    with opened(tmp_path, count=9) as tier:
        assert tier.disk.names(0) == {ARENA + 2: A}
    assert (files(tmp_path) / "group-0").stat().st_size == 9 * BLOCK
    with opened(tmp_path) as tier:
        assert tier.disk.names(0) == {ARENA + 2: A}


def test_the_journal_is_written_anew_when_most_of_it_is_of_no_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferc.runtime.offload.journal.COMPACT_ABOVE", 8)
    journal = Journal(tmp_path / "journal", [4], is_valid=False)
    for turn in range(50):
        journal.commit(0, turn % 3, Stored(bytes([turn]) * 32, b"c" * 16))
        assert (tmp_path / "journal").stat().st_size <= (2 * 3 + 8 + 1) * RECORD_BYTES
    journal.close()
    assert Journal(tmp_path / "journal", [4], is_valid=True).live == journal.live
    assert set(journal.live) == {(0, 0), (0, 1), (0, 2)}


def test_a_disk_that_takes_no_more_is_said_and_what_is_there_stays(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        tier.store(0, 1, A)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2 * BLOCK, before[1]))
            assert "File too large" in (tier.store(5, 1, B).failure or "")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)
        assert tier.store(6, 1, C).failure is None
    with opened(tmp_path) as tier:
        assert list(tier.disk.names(0).values()) == [A, C]


def test_a_folder_is_used_by_one_engine_at_a_time(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(ConfigError, match="in use by another engine; give each a folder of its own"):
        Tier(tmp_path)
    with opened(tmp_path):
        pass


def test_what_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--kv-disk .*: Not a directory; give a folder on a local disk"):
        Tier(tmp_path / "file")
    with pytest.raises(
        ConfigError, match=f"holds 8 blocks of {BLOCK} bytes, expected 9 or more; give {9 * BLOCK} at least"
    ):
        Tier(tmp_path / "small", count=8)


def test_what_was_refused_holds_nothing(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match="holds 8 blocks") as caught:  # whose traceback keeps what was half made
        Tier(tmp_path, count=8)
    assert len(os.listdir("/proc/self/fd")) == before
    with opened(tmp_path):
        assert caught.value is not None


KILLED = """
import os, signal, sys
sys.path[:0] = {path!r}
from pathlib import Path
from test_disk import A, B, Tier
tier = Tier(Path({folder!r}))
assert tier.store(0, 1, A).failure is None
assert tier.store(1, 2, B).failure is None
tier.settle()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_that_was_killed_leaves_what_it_had_committed(tmp_path: Path) -> None:
    here = [str(Path(__file__).parent), *sys.path]
    done = subprocess.run([sys.executable, "-c", KILLED.format(path=here, folder=str(tmp_path))], check=False)
    assert done.returncode == -signal.SIGKILL
    with opened(tmp_path) as tier:
        assert list(tier.disk.names(0).values()) == [A, B]
        assert tier.check(0) is None and tier.check(1) is None


def test_pages_are_asked_for_ahead_only_after_the_disk_was_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[list[tuple[int, int]]] = []
    with opened(tmp_path) as tier:
        ahead = tier.disk._ahead
        monkeypatch.setattr(ahead, "read", asked.append)
        table = np.array([[1, ARENA + 5, ARENA + 2], [ARENA + 2, 0, 0]], np.int32)
        monkeypatch.setattr(ahead, "is_needed", lambda: False)
        tier.disk.read_ahead([table])
        assert not asked
        monkeypatch.setattr(ahead, "is_needed", lambda: True)
        tier.disk.read_ahead([table])
        first = tier.blocks.ctypes.data
        half, where = BLOCK // 2, [first + (ARENA + place) * BLOCK for place in (2, 5)]
        assert asked == [[(at + layer * half, half) for layer in range(2) for at in where]], "layer by layer"
        monkeypatch.undo()
        with caplog.at_level(logging.ERROR):
            ahead.read(asked[0])
