"""Tests of the facts that a stored measurement has about itself."""

import json
import subprocess
import sys
from pathlib import Path

import measured
import pytest


def test_a_result_is_saved_with_its_circumstances(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(measured.ROOT / "benchmarks/some.py"), "--out", "a b.json"])
    measured.report({"cores": 1, "ms": 2.5}, tmp_path / "some.json")
    assert json.loads(capsys.readouterr().out) == {"cores": 1, "ms": 2.5}
    found = json.loads((tmp_path / "some.json").read_text())
    assert found["command"] == "python benchmarks/some.py --out 'a b.json'"
    assert found["ms"] == 2.5 and found["cores"] == 1 and set(found["versions"]) >= {"python", "torch"}
    assert [file.name for file in tmp_path.iterdir()] == ["some.json"]


def test_the_commit_says_whether_the_tree_is_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> None:
        options = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", *options, *words], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)

    monkeypatch.setattr(measured, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert measured.commit() == ""
    result = tmp_path / "benchmarks" / "results" / "some.json"
    result.parent.mkdir(parents=True)
    for file in (tmp_path / "file", result):
        file.write_text("one")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    result.write_text("what was measured just before")
    assert measured.commit() and "+" not in measured.commit()
    (tmp_path / "file").write_text("two")
    assert measured.commit().endswith("+changes")
