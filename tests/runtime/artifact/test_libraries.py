"""Tests that what was checked is what runs: files swapped after the check are not opened."""

import ctypes
import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from inferc.errors import ArtifactError
from inferc.runtime.artifact import libraries
from inferc.runtime.artifact.libraries import Library, open_library
from inferc.runtime.artifact.load import Artifact, load_artifact
from inferc.runtime.engine.load import load_engine
from inferc.runtime.runners.cpu.abi import load_library
from inferc.runtime.text.tokenizer import Text


@pytest.fixture
def copied(tiny_artifact: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_artifact, tmp_path / "copied")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No library is open, as far as this process remembers."""
    monkeypatch.setattr(libraries, "_OPEN", {})


def best(artifact: Artifact) -> Library:
    return artifact.library(artifact.isas[-1])


def mapped() -> str:
    return Path("/proc/self/maps").read_text()


def test_files_that_are_swapped_after_the_check_are_not_opened(copied: Path, fresh: None) -> None:
    artifact = load_artifact(copied)
    for path in (*(copied / "kernels").glob("*.so"), *(copied / "tokenizer").iterdir()):
        path.write_bytes(b"somebody else's")
    load_engine(artifact, max_num_seqs=1, max_num_batched_tokens=16, kv_memory_bytes=1 << 20).close()
    if artifact.tokenizer.has_tokenizer:
        Text(artifact.tokenizer)
    with pytest.raises(ArtifactError, match="truncated"):
        load_artifact(copied)


def test_the_loader_gets_a_file_that_nobody_can_write_to(tiny_artifact: Path, fresh: None) -> None:
    library = best(load_artifact(tiny_artifact))
    opened = load_library(library)
    assert opened._name.startswith("/proc/self/fd/"), "a file without a name"
    file = int(opened._name.rpartition("/")[2])
    assert f"memfd:inferc-{library.path.name}" in mapped() and str(library.path) not in mapped()
    assert fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE
    with pytest.raises(OSError) as error:
        os.write(file, b"x")
    assert error.value.errno == errno.EPERM
    assert open_library(Library(Path("elsewhere.so"), library.data)) is opened, "the same bytes are opened once"


@pytest.mark.parametrize("how", ["no such call", "refused", "nothing in memory is executed"])
def test_without_files_in_memory_it_is_a_private_copy(
    how: str, tiny_artifact: Path, tmp_path: Path, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ctypes.CDLL

    def refused(*_: Any) -> int:
        raise OSError(errno.EACCES, "vm.memfd_noexec")

    def opened(name: str) -> Any:
        if name.startswith("/proc/self/fd/"):
            raise OSError("failed to map segment from shared object")
        (folder,) = tmp_path.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700 and Path(name).parent == folder
        return real(name)

    if how == "no such call":
        monkeypatch.delattr(os, "memfd_create")
    elif how == "refused":
        monkeypatch.setattr(os, "memfd_create", refused)
    monkeypatch.setattr(ctypes, "CDLL", opened)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    library = best(load_artifact(tiny_artifact))
    before = len(os.listdir("/proc/self/fd"))
    assert load_library(library).inferc_abi() > 0
    assert not list(tmp_path.iterdir()), "it is gone once the loader has it"
    assert len(os.listdir("/proc/self/fd")) <= before


def test_where_no_file_can_be_written_it_is_the_file_that_was_checked(
    copied: Path, tmp_path: Path, fresh: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: Any, **__: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "memfd_create", refused)
    monkeypatch.setattr("tempfile.mkdtemp", refused)
    library = best(load_artifact(copied))
    assert load_library(library).inferc_abi() > 0
    assert "is loaded from where it is: no copy of it can be written (No space left on device)" in caplog.text
    libraries._OPEN.clear()
    library.path.write_bytes(b"somebody else's")
    with pytest.raises(ArtifactError, match=r"has changed since it was checked, and no copy can be written"):
        load_library(library)


def test_what_is_no_library_is_told_by_its_own_name(tmp_path: Path) -> None:
    for data in (b"", b"not a library", b"\x7fELF" + bytes(60)):
        with pytest.raises(ArtifactError, match=r"cannot load .*kernels\.so: .*; compile the model again") as error:
            load_library(Library(tmp_path / "kernels.so", data))
        assert "/proc/self" not in str(error.value)


def test_only_what_the_manifest_names_is_read(copied: Path) -> None:
    (copied / "tokenizer" / "special_tokens_map.json").write_text("[")
    (copied / "certificate.json").write_text("[")
    artifact = load_artifact(copied)
    named = {name for name in artifact.manifest.files if name.startswith("tokenizer/")}
    assert {f"tokenizer/{name}" for name in artifact.tokenizer.contents} == named
    with pytest.raises(ArtifactError, match=r"engine\.json names no certificate\.json that has a sha256"):
        artifact.read("certificate.json")
