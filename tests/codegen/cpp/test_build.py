"""Building libraries: kept in the cache where there is one, and built all the same where there is none."""

import ctypes
from pathlib import Path

import pytest

from inferc.codegen.cpp import build as cpp_build
from inferc.codegen.cpp.build import build, check_machine, find_compiler
from inferc.errors import ConfigError

SOURCE = 'extern "C" __attribute__((visibility("default"))) int answer() { return %d; }'


def answer(library: Path) -> int:
    return int(ctypes.CDLL(str(library)).answer())


def test_a_library_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERC_CACHE", str(tmp_path))
    library = build(SOURCE % 1, (), ("avx2",))["avx2"]
    made = library.stat().st_mtime_ns
    assert library.parent == tmp_path / "cpp"
    assert build(SOURCE % 1, (), ("avx2",))["avx2"].stat().st_mtime_ns == made
    assert answer(library) == 1


@pytest.mark.parametrize("variable", ["INFERC_CACHE", "HOME"])
def test_a_cache_that_cannot_be_written(
    tmp_path: Path, variable: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.delenv("INFERC_CACHE", raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "file"))
    library = build(SOURCE % 2, (), ("avx2",))["avx2"]
    assert answer(library) == 2
    assert "kernels are built without a cache: set INFERC_CACHE" in caplog.text
    assert build(SOURCE % 2, (), ("avx2",))["avx2"] == library


def test_a_machine_without_kernels_or_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_machine()
    with pytest.raises(ConfigError, match=r"^no C\+\+ compiler: no g\+\+-1 or g\+\+-2 on PATH; install one"):
        find_compiler("g++-1", "g++-2")
    monkeypatch.setattr(cpp_build, "ISAS", ())
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(
        ConfigError, match="^no kernels for riscv64 processors: the cpu target is for x86_64 and aarch64$"
    ):
        check_machine()
