"""The cached build of generated C++ into one shared library per instruction set.

Kernels take their shapes as arguments, so each is compiled in a unit apart from the programs that call it, once for all
programs: the next model compiles only its own step. Objects and libraries are keyed by source, headers, flags and
compiler. A file in the cache is never changed, only added by an atomic rename, so any number of processes may build at
once. Objects of common kernels may have been built with the package (prebuild.py); any g++ links those.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType

from inferc.codegen.cpp.unit import COMMON_HEADER, HEADERS, CppUnit
from inferc.errors import ConfigError, InfercError
from inferc.system import env as debug

log = logging.getLogger(__name__)

KERNELS_FOLDER = Path(__file__).parent / "kernels"
PREBUILT_FOLDER = Path(__file__).parent / "prebuilt"  # objects that were built with the package, if any

# Flags are spelled out instead of -march=native: the library must run on every machine with these features, and
# virtual machines mask the model number that -march=native depends on.
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (
    *_AVX2,
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
    "-mavx512vnni",
    "-mavx512vbmi",
    "-mavx512bf16",
    "-mprefer-vector-width=512",
)
ISA_FLAGS: dict[str, tuple[str, ...]] = {
    "amx": (*_AVX512, "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
    "avx512": _AVX512,
    "avx2": _AVX2,
    "neon_bf16": ("-march=armv8.2-a+fp16+dotprod+bf16+i8mm",),
    "neon": ("-march=armv8.2-a+fp16+dotprod",),
}
MACHINE_ISAS: dict[str, tuple[str, ...]] = {"x86_64": ("amx", "avx512", "avx2"), "aarch64": ("neon_bf16", "neon")}
# The instruction sets of this machine that an artifact may have a library for, best first.
ISAS = MACHINE_ISAS.get(platform.machine(), ())
# Without -ffast-math and with contraction off, additions happen in the order in which they are written.
FLAGS = (
    "-O3",
    "-std=c++20",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-plt",
    "-Wall",
    "-Wextra",
    "-Werror",
)
LINK_FLAGS = ("-shared", "-Wl,--no-undefined")
# The -Wno flags: g++ 12 warns about the undefined lanes inside its own AVX-512 intrinsics. -fno-schedule-insns: the
# scheduling before register allocation (on AArch64, not on x86) moves all loads of a product's step to its front, which
# makes the product's sums spill to the stack.
GCC_FLAGS = ("-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-psabi", "-fno-schedule-insns")
CLANG_FLAGS = ("-Wno-psabi",)
CALLER_FLAGS = ("-O2", "-fno-implicit-templates")  # for g++ and a unit whose templates other units instantiate
INCLUDE = re.compile(r'^#include "(.+)"', re.MULTILINE)
PRECOMPILED = 3  # the number of units from which on a precompiled header pays


@dataclass(frozen=True)
class Compiler:
    path: str
    version: str  # the first line of --version

    @property
    def flags(self) -> tuple[str, ...]:
        return GCC_FLAGS if self.is_gcc else CLANG_FLAGS

    @property
    def is_gcc(self) -> bool:
        return "clang" not in self.version


@lru_cache
def find_compiler(*names: str) -> Compiler:
    """Return the first C++ compiler of these names, or g++, else clang++; raise ConfigError if there is none."""
    names = names or ("g++", "clang++")
    for name in names:
        path = shutil.which(name)
        if path:
            version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
            return Compiler(path, version.partition("\n")[0])
    wanted = " or ".join(names)
    raise ConfigError(f"no C++ compiler: no {wanted} on PATH; install one (Debian, Ubuntu: apt install g++)")


def check_machine() -> None:
    """Raise ConfigError if nothing can be built for this machine: no kernels for its processor, or no compiler."""
    if not ISAS:
        known = " and ".join(MACHINE_ISAS)
        raise ConfigError(f"no kernels for {platform.machine()} processors: the cpu target is for {known}")
    find_compiler()


def target_isas() -> tuple[str, ...]:
    """Return the instruction sets that an artifact gets a library for, best first: INFERC_ISAS, or all.

    Raises ConfigError if INFERC_ISAS names an unknown one.
    """
    wanted = debug.isas()
    unknown = [name for name in wanted if name not in ISAS]
    if unknown:
        raise ConfigError(f"INFERC_ISAS names {unknown[0]}: expected some of {', '.join(ISAS)}")
    return tuple(isa for isa in ISAS if not wanted or isa in wanted)


_scratch_lock = threading.Lock()


def _scratch() -> tempfile.TemporaryDirectory[str]:
    """Return the temporary folder of what no cache takes; it is removed when the process ends.

    A cache alone does not keep two threads from making a folder each, of which the one that is not kept is removed.
    """
    with _scratch_lock:
        return _make_scratch()


@lru_cache(maxsize=1)
def _make_scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="inferc-")


def _folders() -> list[Path]:
    """Return the folders to search for built libraries; new libraries go into the last of them."""
    try:
        cache = debug.cache_dir() / "cpp"
    except RuntimeError as error:  # the user has no home folder
        log.warning("%s Kernels are built without a cache: set INFERC_CACHE", error)
        return [Path(_scratch().name)]
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            return [cache]
    except OSError as error:
        log.warning("%s: %s; kernels are built without a cache: set INFERC_CACHE", cache, error.strerror)
        return [cache, Path(_scratch().name)]


@dataclass(frozen=True)
class Unit:
    """A C++ translation unit and the flags that only it needs."""

    source: str
    flags: tuple[str, ...] = ()  # in addition to the flags of all units


def build_program(program: CppUnit, isas: Sequence[str] = ISAS) -> dict[str, Path]:
    """Compile the program that `emit` made, and return its libraries by instruction set."""
    # clang has no such flags: there the step's unit has the templates too, and the linker drops one copy of each.
    flags = CALLER_FLAGS if program.leaves_templates and find_compiler().is_gcc else ()
    units = [Unit(program.source, flags), *(Unit(part) for part in program.parts)]
    own = program.own_headers
    return build(units, program.headers, isas, own_headers=own, common=COMMON_HEADER)


def build(
    units: Sequence[Unit],
    headers: Sequence[str],
    isas: Sequence[str] = ISAS,
    folder: Path = KERNELS_FOLDER,
    own_headers: Mapping[str, str] = MappingProxyType({}),
    compiler: Compiler | None = None,
    common: str = "",
) -> dict[str, Path]:
    """Compile `units` into one library per instruction set, in parallel, and return the libraries by instruction set.

    headers: the files of `folder` that the units include; own_headers: other headers, by name; compiler: a compiler
    other than the system's, for instruction sets of other machines; common: the header that all units include first, if
    any. Raises ConfigError without a compiler, and InfercError with the compiler's first error if it refuses the
    source. If the cache cannot be written, the libraries last as long as the process.
    """
    compiler = compiler or find_compiler()
    texts = {**{name: (folder / name).read_text() for name in headers}, **own_headers}
    places = _folders()
    builders = [_Builder(compiler, isa, units, texts, common, places) for isa in isas]
    with ExitStack() as stack, ThreadPoolExecutor(os.cpu_count()) as threads:
        behind = [builder for builder in builders if builder.missing()]
        for builder in behind:
            builder.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=places[-1])))
        list(threads.map(lambda builder: builder.prepare(), behind))
        work = [(builder, unit) for builder in behind for unit in builder.missing()]
        list(threads.map(lambda item: item[0].compile(item[1]), work))
        return dict(zip(isas, threads.map(lambda builder: builder.link(), builders), strict=True))


@dataclass(eq=False)
class _Builder:
    """The build of one library: units that the cache lacks are compiled in `folder`, which is temporary."""

    compiler: Compiler
    isa: str
    units: Sequence[Unit]
    headers: Mapping[str, str]
    common: str
    places: Sequence[Path]
    folder: Path | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        return (*FLAGS, *self.compiler.flags, *ISA_FLAGS[self.isa])

    @cached_property
    def objects(self) -> dict[Unit, str]:
        """The names of the units' objects in the cache."""
        return {
            unit: f"{self._digest(unit.flags, [unit.source, *self._included(unit.source)])}-{self.isa}.o"
            for unit in self.units
        }

    @cached_property
    def library(self) -> str:
        return f"{self._digest((), self.objects.values())}-{self.isa}.so"

    def missing(self) -> list[Unit]:
        """Return the units that are still to be compiled."""
        if self._find(self.library):
            return []
        return [unit for unit in self.units if not self._object(unit)]

    def prepare(self) -> None:
        """Write the headers, and precompile the common one if many units will include it.

        Precompiled headers (tens of MB each) last as long as the process: a process that compiles several models has
        them for all of these.
        """
        assert self.folder is not None
        for name, text in self.headers.items():
            (self.folder / name).write_text(text)
        if self.common and len(self.missing()) >= PRECOMPILED:
            shared = [flag for flag in self.units[0].flags if all(flag in unit.flags for unit in self.units)]
            made = self.folder / f"{self.common}.gch"
            included = self._included(f'#include "{self.common}"')
            kept = Path(_scratch().name) / f"{self._digest(shared, included)}.gch"
            if not kept.exists():
                self._run(*shared, "-w", "-x", "c++-header", self.common, "-o", made.name)
                shutil.move(made, kept)
            made.symlink_to(kept)

    def compile(self, unit: Unit) -> None:
        assert self.folder is not None
        target = self.places[-1] / self.objects[unit]
        # A relative source name keeps the folder's random name out of the object: equal input, equal bytes.
        (self.folder / f"{target.stem}.cpp").write_text(unit.source)
        self._run(*unit.flags, "-c", f"{target.stem}.cpp", "-o", target.name)
        os.replace(self.folder / target.name, target)

    def link(self) -> Path:
        """Link the library from the units' objects, which must all be in the cache, unless the cache has it."""
        found = self._find(self.library)
        if found:
            return found
        target = self.places[-1] / self.library
        objects = [str(self._object(unit)) for unit in self.units]
        with tempfile.TemporaryDirectory(dir=target.parent) as work:
            self._run(*LINK_FLAGS, *objects, "-o", f"{work}/unit.so")
            os.replace(f"{work}/unit.so", target)
        return target

    def _run(self, *arguments: str) -> None:
        command = [self.compiler.path, *self.flags, *arguments, *debug.cxx_flags()]
        result = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)
        if result.returncode:
            all_lines = result.stderr.splitlines()
            lines = [line for line in all_lines if "error" in line or "undefined reference" in line] or all_lines
            raise InfercError(f"{self.compiler.path} failed for {self.isa}: {lines[0] if lines else result.returncode}")

    def _digest(self, flags: Sequence[str], texts: Iterable[str]) -> str:
        return _digest((self.compiler.version, *self.flags, *flags, *debug.cxx_flags(), *texts))

    def prebuilt(self, unit: Unit) -> str:
        """Return the name of a unit's object in the folder of those that were built with the package."""
        texts = (*self.flags, *unit.flags, unit.source, *self._included(unit.source))
        return f"{_digest(texts)}-{self.isa}.o"

    def _object(self, unit: Unit) -> Path | None:
        """Return where a unit's object is, in the cache or built with the package; None if it is still to be made."""
        if found := self._find(self.objects[unit]):
            return found
        if not self.compiler.is_gcc or debug.cxx_flags():
            return None
        built = PREBUILT_FOLDER / self.prebuilt(unit)
        return built if os.path.exists(built) else None

    def _included(self, source: str) -> list[str]:
        """Return the names and texts of the headers that a source includes, directly or not."""
        found: dict[str, str] = {}
        texts = [source]
        while texts:
            for name in INCLUDE.findall(texts.pop()):
                if name in self.headers and name not in found:
                    found[name] = self.headers[name]
                    texts.append(found[name])
        return [part for name in sorted(found) for part in (name, found[name])]

    def _find(self, name: str) -> Path | None:
        # os.path.exists, since Path.exists raises if a parent folder may not be read.
        return next((place / name for place in self.places if os.path.exists(place / name)), None)


def build_objects(units: Sequence[Unit], folder: Path, isas: Sequence[str], jobs: int) -> int:
    """Compile the units that `folder` lacks, as objects for any g++; return how many were compiled.

    Objects of other units are removed from the folder. Raises ConfigError without g++.
    """
    compiler = find_compiler("g++")
    folder.mkdir(parents=True, exist_ok=True)
    texts = {name: (KERNELS_FOLDER / name).read_text() for name in HEADERS}
    with tempfile.TemporaryDirectory(dir=folder) as scratch, ThreadPoolExecutor(jobs) as threads:
        places = [Path(scratch)]
        builders = [_Builder(compiler, isa, units, texts, COMMON_HEADER, places) for isa in isas]
        for builder in builders:
            builder.folder = Path(scratch) / builder.isa
            builder.folder.mkdir()
        wanted = {(builder, unit): folder / builder.prebuilt(unit) for builder in builders for unit in builder.units}
        for each in folder.glob("*.o"):
            if each not in wanted.values():
                each.unlink()
        behind = [key for key, target in wanted.items() if not target.exists()]
        list(threads.map(_Builder.prepare, {builder for builder, _ in behind}))
        list(threads.map(lambda key: key[0].compile(key[1]), behind))
        for builder, unit in behind:
            os.replace(places[0] / builder.objects[unit], wanted[builder, unit])
    return len(behind)


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{len(text)}:{text}".encode())
    return digest.hexdigest()[:32]
