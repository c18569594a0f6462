"""The CPU's kernels are compiled while the program is checked, and what fails there is told once, by the compile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Event, current_thread, main_thread
from typing import Any

import pytest

from inferc.codegen.cpp import build as cpp_build
from inferc.compiler.build import compile
from inferc.compiler.equivalence import ProgramCheck
from inferc.config import CompileConfig
from inferc.errors import InfercError

LIMIT = 60.0  # seconds


def test_kernels_are_compiled_while_the_program_is_checked(
    tiny_llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, in_background = Event(), list[bool]()
    build_program, run = cpp_build.build_program, ProgramCheck.run

    def building(unit: Any, isas: Sequence[str]) -> dict[str, Path]:
        found = build_program(unit, isas)
        in_background.append(current_thread() is not main_thread())
        built.set()
        return found

    def checking(check: ProgramCheck, *arguments: Any) -> str:
        assert built.wait(LIMIT), "the check runs, and nothing is built beside it"
        return run(check, *arguments)

    monkeypatch.setattr(cpp_build, "build_program", building)
    monkeypatch.setattr(ProgramCheck, "run", checking)
    compile(tiny_llama_folder, tmp_path / "out", CompileConfig(dtype="float32"))
    assert in_background == [True, False], "once beside the check, and once to find what that has built"


def test_a_build_that_fails_is_told(tiny_llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> dict[str, Path]:
        raise InfercError("g++ failed for avx2: error: no space left")

    monkeypatch.setattr(cpp_build, "build_program", failing)
    with pytest.raises(InfercError, match="no space left"):
        compile(tiny_llama_folder, tmp_path / "out", CompileConfig(dtype="float32"))
    assert not (tmp_path / "out").exists()
