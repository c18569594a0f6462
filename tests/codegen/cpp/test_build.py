"""Building libraries: kept in the cache where there is one, and built all the same where there is none."""

import ctypes
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from threading import Event, Lock, get_ident
from typing import Any

import pytest

from inferc.codegen.cpp import build as cpp_build
from inferc.codegen.cpp.build import Unit, build, check_machine, find_compiler
from inferc.errors import ConfigError, InfercError

SOURCE = 'extern "C" __attribute__((visibility("default"))) int answer() { return %d; }'


def answer(library: Path) -> int:
    return int(ctypes.CDLL(str(library)).answer())


def test_a_library_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERC_CACHE", str(tmp_path))
    library = build([Unit(SOURCE % 1)], (), ("avx2",))["avx2"]
    made = library.stat().st_mtime_ns
    assert library.parent == tmp_path / "cpp"
    assert build([Unit(SOURCE % 1)], (), ("avx2",))["avx2"].stat().st_mtime_ns == made
    assert answer(library) == 1


@pytest.mark.parametrize("variable", ["INFERC_CACHE", "HOME"])
def test_a_cache_that_cannot_be_written(
    tmp_path: Path, variable: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.delenv("INFERC_CACHE", raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "file"))
    library = build([Unit(SOURCE % 2)], (), ("avx2",))["avx2"]
    assert answer(library) == 2
    assert "kernels are built without a cache: set INFERC_CACHE" in caplog.text
    assert build([Unit(SOURCE % 2)], (), ("avx2",))["avx2"] == library


class Meeting:
    """A lock that tells when two threads have come, to the lock or to what it guards."""

    def __init__(self) -> None:
        self.lock, self.threads, self.both = Lock(), set[int](), Event()

    def come(self) -> None:
        self.threads.add(get_ident())
        if len(self.threads) == 2:
            self.both.set()

    def __enter__(self) -> None:
        self.come()
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def test_threads_that_build_at_once_share_their_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were there a folder for each, the one that nobody keeps would be removed while a compiler writes to it."""
    original, meeting = tempfile.TemporaryDirectory, Meeting()

    def made(**options: Any) -> tempfile.TemporaryDirectory[str]:
        meeting.come()
        assert meeting.both.wait(60), "the other thread has come neither to the lock nor here"
        return original(**options)

    monkeypatch.setattr(cpp_build, "_scratch_lock", meeting)
    monkeypatch.setattr(cpp_build, "_make_scratch", lru_cache(maxsize=1)(cpp_build._make_scratch.__wrapped__))
    monkeypatch.setattr(tempfile, "TemporaryDirectory", made)
    with ThreadPoolExecutor(2) as threads:
        one, two = threads.map(lambda _: cpp_build._scratch(), range(2))
    assert one is two
    one.cleanup()


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


TEMPLATE = "#pragma once\ntemplate <class T> __attribute__((noinline)) T plus(T x) { return x + %d; }\n"
CALLER = """#include "plus.h"
extern "C" __attribute__((visibility("default"))) int answer() { return plus<int>(%d); }
"""
INSTANCE = '#include "plus.h"\n[[gnu::used]] static const auto use = &plus<%s>;\n'


def answer_of(added: int, to: int, headers: dict[str, str] | None = None, types: tuple[str, ...] = ("int",)) -> int:
    units = [Unit(CALLER % to, cpp_build.CALLER_FLAGS), *(Unit(INSTANCE % each) for each in types)]
    own = {"plus.h": TEMPLATE % added, **(headers or {})}
    return answer(build(units, (), ("avx2",), own_headers=own, common="plus.h")["avx2"])


def test_a_unit_is_compiled_once_for_all_that_take_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit is compiled again if a header that it includes has changed, and no other unit is."""
    monkeypatch.setenv("INFERC_CACHE", str(tmp_path))
    made: list[int] = []

    def files(kind: str) -> int:
        return len(list((tmp_path / "cpp").glob(f"*.{kind}")))

    for args in ((1, 5), (1, 6), (1, 6, {"other.h": "wrong"}), (2, 6)):
        made.append(answer_of(*args))
    assert made == [6, 7, 7, 8]
    assert (files("o"), files("so")) == (2 + 1 + 0 + 2, 3)
    assert answer_of(1, 5, types=("int", "long", "short", "char")) == 6  # enough of them to read the header once
    assert files("o") == 5 + 3
    assert not [path for path in (tmp_path / "cpp").iterdir() if path.suffix not in (".o", ".so")]


def test_flags_of_the_user_come_last_and_have_libraries_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERC_CACHE", str(tmp_path))
    source = 'extern "C" __attribute__((visibility("default"))) int answer() { return ANSWER; }\n'

    def built(flags: str) -> Path:
        monkeypatch.setenv("INFERC_CXXFLAGS", flags)
        return build([Unit(source, ("-DANSWER=1",))], (), ("avx2",))["avx2"]

    one, two = built("-O1"), built("-O1 -UANSWER -DANSWER='1 + 1'")
    assert (answer(one), answer(two)) == (1, 2) and one != two
    with pytest.raises(ConfigError, match="INFERC_CXXFLAGS is .*: No closing quotation; close it"):
        built("-DANSWER='1")


def test_what_the_compiler_refuses_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERC_CACHE", str(tmp_path))
    units = [Unit(SOURCE % 3), Unit("int unfinished() { return nothing; }\n")]
    with pytest.raises(InfercError, match=r"^\S+ failed for avx2: .*nothing.*not declared[^\n]*$"):
        build(units, (), ("avx2",))
    assert not list((tmp_path / "cpp").glob("*.so"))
    with pytest.raises(InfercError, match="undefined"):  # by no unit
        answer_of(1, 1, types=("long",))
