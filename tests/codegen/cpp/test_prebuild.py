"""Kernels that are built ahead of the first compile: every compile finds them, and the list holds what models call."""

from __future__ import annotations

import json
from pathlib import Path

import common_kernels
import pytest

from inferc.cli.prebuild import main
from inferc.codegen.cpp import build as cpp_build
from inferc.codegen.cpp import prebuild
from inferc.codegen.cpp.build import Unit, build, build_objects
from inferc.codegen.cpp.unit import COMMON_HEADER, HEADERS, kernel_parts
from inferc.errors import ConfigError

ISA = cpp_build.ISAS[-1]  # that of every machine
UNITS = [Unit(kernel_parts([("index_select<float>", False)], ())[0])]
STEP = Unit(f'#include "{COMMON_HEADER}"\nextern "C" int step() {{ return 3; }}\n')


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Unit]:
    """Return the units that are compiled from here on, with nothing built so far."""
    monkeypatch.setenv("INFERC_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("INFERC_CXXFLAGS", raising=False)
    monkeypatch.setattr(cpp_build, "PREBUILT_FOLDER", tmp_path / "prebuilt")
    found: list[Unit] = []
    real = cpp_build._Builder.compile

    def compile(builder: cpp_build._Builder, unit: Unit) -> None:
        found.append(unit)
        real(builder, unit)

    monkeypatch.setattr(cpp_build._Builder, "compile", compile)
    return found


def test_a_compile_finds_what_was_built_ahead(units: list[Unit], tmp_path: Path) -> None:
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    (folder / "of-an-older-version.o").touch()
    assert build_objects(UNITS, folder, [ISA], jobs=1) == len(UNITS) == len(units)
    assert build_objects(UNITS, folder, [ISA], jobs=1) == 0
    assert len(list(folder.iterdir())) == len(UNITS), "what nobody asks for any more is removed"
    units.clear()
    first = build([STEP, *UNITS], HEADERS, [ISA], common=COMMON_HEADER)[ISA]
    assert units == [STEP]
    assert first.read_bytes() == build([STEP, *UNITS], HEADERS, [ISA], common=COMMON_HEADER)[ISA].read_bytes()
    assert units == [STEP], "and the library is kept"


def test_flags_of_ones_own_need_objects_of_their_own(
    units: list[Unit], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_objects(UNITS, tmp_path / "prebuilt", [ISA], jobs=1)
    units.clear()
    monkeypatch.setenv("INFERC_CXXFLAGS", "-O1")
    build([STEP, *UNITS], HEADERS, [ISA], common=COMMON_HEADER)
    assert set(units) == {STEP, *UNITS}


@pytest.mark.parametrize(
    "family", ["llama-tied", *(pytest.param(each, marks=pytest.mark.slow) for each in common_kernels.FAMILIES)]
)
def test_the_list_has_the_kernels_of(family: str, tmp_path: Path) -> None:
    """`python tests/support/common_kernels.py` writes the list anew."""
    listed = {row["kernel"] for row in json.loads(prebuild.COMMON.read_text())}
    dtypes = ("bfloat16",) if family == "llama-tied" else common_kernels.DTYPES
    for name, kernels in common_kernels.needed(tmp_path, [family], dtypes):
        assert kernels and set(kernels) <= listed, name


@pytest.mark.slow
def test_the_list_has_no_others() -> None:
    assert json.loads(prebuild.COMMON.read_text()) == common_kernels.rows()


def test_kernels_of_a_program_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    every, some = prebuild.common_units(), prebuild.common_units(["llama bfloat16"])
    assert 3 < len(some) < len(every)
    assert set(some) < set(every)
    with pytest.raises(ConfigError, match="--only llama: expected one of llama bfloat16, "):
        prebuild.common_units(["llama"])
    assert main(["--only", "llama", "--out", str(tmp_path / "out")]) == 2
    assert "no kernels are built ahead (--only llama: expected" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
