"""Building libraries: kept in the cache where there is one, and built all the same where there is none."""

import ctypes
from pathlib import Path

import pytest

from inferc.codegen.cpp.build import build

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
