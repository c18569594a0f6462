"""The output folder appears whole or not at all, and never takes anything of the user's with it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inferc.codegen import folder as folder_module
from inferc.codegen.folder import OutputFolder
from inferc.errors import ConfigError


def write_artifact(path: Path, text: str) -> None:
    path.mkdir()
    (path / "program.json").write_text(text)
    (path / "engine.json").write_text(json.dumps({"producer": "inferc 0.1.0", "files": {"program.json": {}}}))


def contents(path: Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*"))


def test_commit_puts_it_in_place(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b" / "out"
    with OutputFolder(out) as folder:
        folder.write("kernels/x.so", b"x")
        assert not out.exists()
        folder.commit()
    assert contents(tmp_path) == ["a", "a/b", "a/b/out", "a/b/out/kernels", "a/b/out/kernels/x.so"]


@pytest.mark.parametrize("step", ["_try_lock", "shutil.rmtree", "Path.rename"])
def test_an_interrupt_while_it_is_opened_leaves_nothing(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Any = {"shutil.rmtree": shutil.rmtree, "Path.rename": Path.rename, "_try_lock": folder_module._try_lock}[step]
    calls: list[object] = []

    def interrupted(*args: object, **options: object) -> object:
        calls.append(args)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return real(*args, **options)

    if step == "shutil.rmtree":  # of what a killed compile left behind
        (tmp_path / ".out.partial-0").mkdir()
    monkeypatch.setattr(f"inferc.codegen.folder.{step}", interrupted)
    with pytest.raises(KeyboardInterrupt):
        OutputFolder(tmp_path / "out").__enter__()
    assert calls and [name for name in contents(tmp_path) if "partial-0" not in name] == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_without_commit_nothing_stays(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), OutputFolder(tmp_path / "a" / "b" / "out") as folder:
        folder.write("kernels/x.so", b"x")
        raise error
    assert contents(tmp_path) == []


def test_an_artifact_is_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_artifact(out, "old")
    (out / "program.json").chmod(0o444)
    with OutputFolder(out) as folder:
        folder.write("program.json", b"new")
        assert (out / "program.json").read_text() == "old"
        folder.commit()
    assert contents(tmp_path) == ["out", "out/program.json"]
    assert (out / "program.json").read_text() == "new"


def test_a_failed_compile_leaves_the_artifact_that_was_there(tmp_path: Path) -> None:
    write_artifact(tmp_path / "out", "old")
    with pytest.raises(RuntimeError), OutputFolder(tmp_path / "out") as folder:
        folder.write("program.json", b"new")
        raise RuntimeError
    assert contents(tmp_path) == ["out", "out/engine.json", "out/program.json"]


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with OutputFolder(tmp_path / "out") as folder:
        folder.write("x", b"x")
        folder.commit()
    assert contents(tmp_path) == ["out", "out/x"]


def test_a_users_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with (
        pytest.raises(ConfigError, match="exists and is not an inferc artifact; choose another"),
        OutputFolder(tmp_path),
    ):
        pass
    assert contents(tmp_path) == ["notes.txt"]


def test_an_artifact_with_a_users_file_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_artifact(out, "old")
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"an artifact that also holds other files \(notes.txt\); move them"):
        OutputFolder(out).__enter__()
    assert contents(tmp_path) == ["out", "out/engine.json", "out/notes.txt", "out/program.json"]


def test_a_file_that_appears_meanwhile_is_not_lost(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_artifact(out, "old")
    with pytest.raises(ConfigError, match="other files"), OutputFolder(out) as folder:
        folder.write("program.json", b"new")
        (out / "notes.txt").write_text("mine")
        folder.commit()
    assert (out / "program.json").read_text() == "old"


def test_unwritable_outputs_are_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(ConfigError, match="file is a file; choose another output folder"):
        OutputFolder(file).__enter__()
    with pytest.raises(ConfigError, match="cannot write .*/file/out: Not a directory; choose an"):
        OutputFolder(file / "out").__enter__()
    with pytest.raises(ConfigError, match="cannot write /proc/inferc-out: .*; choose an"):
        OutputFolder(Path("/proc/inferc-out")).__enter__()
    assert contents(tmp_path) == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_parent_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(ConfigError, match="cannot write .*: Permission denied; choose an"):
        OutputFolder(tmp_path / "out").__enter__()


KILLED = """
import os, sys
from pathlib import Path
from inferc.codegen import folder as folder_module
from inferc.codegen.folder import OutputFolder

OutputFolder(Path(sys.argv[1])).__enter__().write("x", b"x")
os._exit(1)
"""


def test_what_a_killed_compile_left_goes_away(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, tmp_path / "out"], check=False)
    assert len(list(tmp_path.iterdir())) == 1
    with OutputFolder(tmp_path / "out") as folder:
        folder.write("x", b"x")
        folder.commit()
    assert contents(tmp_path) == ["out", "out/x"]


def test_a_live_compile_keeps_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process id of a compile in another container means nothing here."""
    monkeypatch.setattr("os.getpid", lambda: 999999999)
    with OutputFolder(tmp_path / "out") as first:
        monkeypatch.undo()
        first.write("program.json", b"first")
        with OutputFolder(tmp_path / "out") as second:
            second.write("x", b"second")
            second.commit()
        assert contents(first.path) == ["program.json"]
    assert contents(tmp_path) == ["out", "out/x"]


def test_a_kill_between_two_renames_keeps_the_old_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a system that cannot swap two folders, the second rename is the last thing that is tried."""

    class Killed(BaseException):
        pass

    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path.name == "artifact":
            raise Killed
        return real(path, target)

    write_artifact(tmp_path / "out", "old")
    with pytest.raises(Killed), OutputFolder(tmp_path / "out") as folder:
        folder.write("program.json", b"new")
        monkeypatch.setattr("ctypes.CDLL", lambda *_args, **_kwargs: object())
        monkeypatch.setattr(Path, "rename", rename)
        folder.commit()
    monkeypatch.undo()
    with OutputFolder(tmp_path / "out"):
        pass
    (kept,) = tmp_path.iterdir()
    assert kept.name.startswith("out.previous-")
    assert (kept / "program.json").read_text() == "old"
