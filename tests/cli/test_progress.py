"""The progress of long commands where standard error is no terminal: a line for each stage, and none for quick ones."""

from __future__ import annotations

import io
import os
import pty
import subprocess
from pathlib import Path

import pytest
from command_line import run_inferc
from serving import INFERC

from inferc.cli import progress
from inferc.cli.progress import LineProgress

Reports = list[tuple[float, str, int, int]]


def lines(reports: Reports) -> list[str]:
    """Return what is written for (second, stage, done, total)."""
    stream = io.StringIO()
    times = iter([0.0, *(second for second, *_ in reports)])
    report = LineProgress(stream, clock=lambda: next(times))
    for _, stage, done, total in reports:
        report(stage, done, total)
    return stream.getvalue().splitlines()


def test_each_stage_has_a_line() -> None:
    assert lines([(2.5, "capture", 0, 1), (9.0, "lower", 0, 33), (12.0, "write weights", 0, 100)]) == [
        "inferc:    2 s  capture",
        "inferc:    9 s  lower",
        "inferc:   12 s  write weights",
    ]


def test_a_stage_that_goes_on_tells_how_long_it_still_takes() -> None:
    reports = [(3.0, "write weights", 0, 100), (8.0, "write weights", 10, 100), (23.0, "write weights", 40, 100)]
    assert lines(reports)[1:] == ["inferc:   23 s  write weights: 40%, about 30 s more"]
    assert lines([(3.0, "wait", 0, 1), (20.0, "wait", 0, 1)])[1:] == ["inferc:   20 s  wait"]


def test_what_is_quick_has_no_line() -> None:
    assert lines([(0.1, "capture", 0, 1), (1.9, "lower", 3, 33)]) == []
    assert len(lines([(5.0, "capture", 0, 1), (5.2, "lower", 0, 33), (5.4, "write", 0, 9), (7.0, "link", 0, 1)])) == 2


@pytest.mark.parametrize("how", ["lines", "none"])
def test_a_compile_in_a_pipe_tells_its_stages(
    tiny_llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(progress, "FIRST", 0.0)
    monkeypatch.setattr(progress, "APART", 0.0)
    options = ("-o", tmp_path / "out", "--target", "reference", "--certify", "none")
    done = run_inferc("compile", tiny_llama_folder, *options, env={"INFERC_PROGRESS": how})
    told = [line.split(" s  ")[1].split(":")[0] for line in done.stderr.splitlines()]
    assert list(dict.fromkeys(told)) == (
        ["read the tokenizer", "capture", "lower", "write weights"] if how == "lines" else []
    )


def test_a_terminal_has_a_bar(tiny_llama_folder: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [*INFERC, "compile", str(tiny_llama_folder), "-o", str(tmp_path / "out"), "--target", "reference"]
    environment = {name: value for name, value in os.environ.items() if name != "INFERC_PROGRESS"}
    process = subprocess.Popen([*command, "--certify", "none"], stderr=theirs, env={**environment, "TERM": "xterm"})
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:  # the other end is closed: the command is done
        pass
    os.close(ours)
    assert process.wait() == 0 and b"\x1b[" in shown and b"capture" in shown


@pytest.mark.parametrize("how", ["loud", "Bar"])
def test_another_way_is_refused(tiny_llama_folder: Path, tmp_path: Path, how: str) -> None:
    done = run_inferc("compile", tiny_llama_folder, "-o", tmp_path / "out", env={"INFERC_PROGRESS": how})
    assert done.returncode == 2 and f"INFERC_PROGRESS is '{how}', expected one of bar, lines, none" in done.stderr
