"""Files that users' texts can be read from are for their owner alone, under any umask and from the first moment on."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from inferc.runtime.offload.disk import DiskStore
from inferc.runtime.openai.batch_file import BatchOutput
from inferc.runtime.record.format import Header, Identity
from inferc.runtime.record.recorder import Recorder
from inferc.runtime.record.tapped import TapCollector, TappedSequence, write_tapped
from inferc.serve.security.access import write_keys
from inferc.system.atomic_file import atomic_write
from inferc.system.private_files import open_private, private_folder


@pytest.fixture(autouse=True, params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def modes(folder: Path) -> dict[str, int]:
    """Return the modes of all files in a folder."""
    return {str(path.relative_to(folder)): mode(path) for path in folder.rglob("*")}


def kv_disk(folder: Path) -> None:
    tier = DiskStore(folder / "kv" / "model", {"model": "m"}, [4096], 1 << 20)
    memory = np.zeros((8 + tier.num_blocks[0], 4096), np.uint8)
    tier.attach([memory], [1])
    tier.close()


def recording(folder: Path) -> None:
    header = Header(Identity("0" * 64, "cpu", "avx2", False, None), "/m", "inferc", 0.0, {})
    Recorder(folder / "recording.jsonl", header).close()


def batch(folder: Path) -> None:
    BatchOutput(folder / "answers.jsonl", "f" * 16)._file.close()


def keys(folder: Path) -> None:
    write_keys(folder / "keys.json", [])


def tapped(folder: Path) -> None:
    TapCollector((), folder / "taps").close()
    row = TappedSequence("r", 0, np.zeros(1, np.int32), np.zeros(1, np.int64), {})
    write_tapped(folder / "taps" / "r.npz", [row])


@pytest.mark.parametrize("write", [kv_disk, recording, batch, keys, tapped])
def test_what_holds_users_texts_is_for_its_owner(write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path)
    found = modes(tmp_path)
    assert found
    for name, each in found.items():
        wanted = stat.S_IRWXU if (tmp_path / name).is_dir() else stat.S_IRUSR | stat.S_IWUSR
        assert each == wanted, f"{name} is {each:o}"


@pytest.mark.parametrize("write", [kv_disk, recording, batch, keys])
def test_what_an_earlier_run_left_wider_is_closed(write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path)
    ours = [path for path in tmp_path.rglob("*") if path != tmp_path / "kv"]
    for path in ours:
        path.chmod(0o777 if path.is_dir() else 0o666)
    if (tmp_path / "kv").exists():
        (tmp_path / "kv" / "model").chmod(0o755)  # the user's own
    write(tmp_path)
    for name, each in modes(tmp_path).items():
        if name != "kv/model":
            assert each & 0o077 == 0, f"{name} is {each:o}"


def test_a_file_is_never_wider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is narrow by the mode that the system is asked for, and not by one that is set afterwards."""
    asked = []
    real = os.open

    def watched(path: str, flags: int, mode: int = 0o777, **more: int) -> int:
        asked.append(mode)
        return real(path, flags, mode, **more)

    monkeypatch.setattr(os, "open", watched)
    os.close(open_private(tmp_path / "a", os.O_WRONLY))
    with atomic_write(tmp_path / "b", private=True) as partial:
        partial.write_text("text")
        assert mode(partial) == 0o600
    assert asked[:2] == [0o600, 0o600] and mode(tmp_path / "b") == 0o600


def test_a_whole_file_that_was_wider_is_closed(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("before")
    (tmp_path / "b").chmod(0o666)
    with atomic_write(tmp_path / "b", private=True) as partial:
        partial.write_text("after")
    assert mode(tmp_path / "b") == 0o600 and (tmp_path / "b").read_text() == "after"


def test_a_folder_of_the_users_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine").chmod(0o755)
    private_folder(tmp_path / "mine", is_ours=False)
    assert mode(tmp_path / "mine") == 0o755
    with pytest.raises(FileNotFoundError):
        private_folder(tmp_path / "none" / "mine", is_ours=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        private_folder(tmp_path / "file")
