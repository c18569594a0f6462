"""Compile generated C++ into one shared library per instruction set, with a cache.

Libraries are keyed by source, headers, flags and compiler; a library in the cache is never changed, only added by an
atomic rename, so any number of processes may build at once.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

from inferc import debug
from inferc.errors import ConfigError, InfercError

log = logging.getLogger(__name__)

KERNELS_FOLDER = Path(__file__).parent / "kernels"

# Flags are spelled out and never -march=native: the library must run on every machine with these features, and
# virtual machines mask the model number that -march=native goes by.
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (
    *(*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
    *("-mavx512vnni", "-mavx512vbmi", "-mavx512bf16", "-mprefer-vector-width=512"),
)
ISA_FLAGS: dict[str, tuple[str, ...]] = {
    "amx": (*_AVX512, "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
    "avx512": _AVX512,
    "avx2": _AVX2,
    "neon_bf16": ("-march=armv8.2-a+fp16+dotprod+bf16+i8mm",),
    "neon": ("-march=armv8.2-a+fp16+dotprod",),
}
MACHINE_ISAS: dict[str, tuple[str, ...]] = {"x86_64": ("amx", "avx512", "avx2"), "aarch64": ("neon_bf16", "neon")}
ISAS = MACHINE_ISAS.get(platform.machine(), ())  # those that an artifact has a library for, best first
# No -ffast-math and no contraction: additions happen in the order in which they are written.
FLAGS = (
    *("-O3", "-std=c++20", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fno-plt", "-Wall", "-Wextra", "-Werror"),
)
# g++ 12 takes the undefined lanes inside its own AVX-512 intrinsics for a fault of ours. What it schedules before it gives
# out registers (on AArch64, not on x86) is all loads of a product's step first: its sums then go through the stack.
GCC_FLAGS = ("-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-psabi", "-fno-schedule-insns")
CLANG_FLAGS = ("-Wno-psabi",)


@dataclass(frozen=True)
class Compiler:
    path: str
    version: str  # the first line of --version

    @property
    def flags(self) -> tuple[str, ...]:
        return CLANG_FLAGS if "clang" in self.version else GCC_FLAGS


@lru_cache
def find_compiler(*names: str) -> Compiler:
    """The first C++ compiler of these names, or the system's: g++, else clang++. Raises ConfigError if there is none."""
    names = names or ("g++", "clang++")
    for name in names:
        path = shutil.which(name)
        if path:
            version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
            return Compiler(path, version.partition("\n")[0])
    wanted = " or ".join(names)
    raise ConfigError(f"no C++ compiler: no {wanted} on PATH; install one (Debian, Ubuntu: apt install g++)")


def check_machine() -> None:
    """Raise ConfigError where nothing can be built for this machine: no kernels for its processor, or no compiler."""
    if not ISAS:
        known = " and ".join(MACHINE_ISAS)
        raise ConfigError(f"no kernels for {platform.machine()} processors: the cpu target is for {known}")
    find_compiler()


@lru_cache(maxsize=1)
def _scratch() -> tempfile.TemporaryDirectory[str]:
    """Where libraries are built that no cache takes. It goes away with the process."""
    return tempfile.TemporaryDirectory(prefix="inferc-")


def _folders() -> list[Path]:
    """Where to look for built libraries; new ones go into the last."""
    try:
        cache = debug.cache_dir() / "cpp"
    except RuntimeError as error:  # a user without a home
        log.warning("%s Kernels are built without a cache: set INFERC_CACHE", error)
        return [Path(_scratch().name)]
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            return [cache]
    except OSError as error:
        log.warning("%s: %s; kernels are built without a cache: set INFERC_CACHE", cache, error.strerror)
        return [cache, Path(_scratch().name)]


def build(
    source: str,
    headers: Sequence[str],
    isas: Sequence[str] = ISAS,
    folder: Path = KERNELS_FOLDER,
    own_headers: Mapping[str, str] = MappingProxyType({}),
    compiler: Compiler | None = None,
) -> dict[str, Path]:
    """Compile `source` once for each instruction set, in parallel; returns the libraries by instruction set.

    headers: the files of `folder` that it includes; own_headers: others, name to text; compiler: another than the
    system's, for instruction sets of other machines. Raises ConfigError without a compiler, InfercError with the compiler's
    first error if it refuses the source. Where the cache cannot be written, they last as long as the process.
    """
    compiler = compiler or find_compiler()
    texts = {**{name: (folder / name).read_text() for name in headers}, **own_headers}
    places = _folders()
    with ThreadPoolExecutor() as threads:
        made = threads.map(lambda isa: _build_one(compiler, source, texts, isa, places), isas)
        return dict(zip(isas, made, strict=True))


def _build_one(compiler: Compiler, source: str, headers: Mapping[str, str], isa: str, places: Sequence[Path]) -> Path:
    flags = [*FLAGS, *compiler.flags, *ISA_FLAGS[isa]]
    digest = hashlib.sha256()
    for text in (compiler.version, *flags, source, *(part for item in sorted(headers.items()) for part in item)):
        digest.update(f"{len(text)}:{text}".encode())
    targets = [place / f"{digest.hexdigest()[:32]}-{isa}.so" for place in places]
    for target in targets:
        if os.path.exists(target):  # Path.exists raises where a folder above may not be read
            return target
    target = targets[-1]
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        folder = Path(work)
        for name, text in {**headers, "unit.cpp": source}.items():
            (folder / name).write_text(text)
        # A relative source name keeps the folder's random name out of the library: equal input, equal bytes.
        command = [compiler.path, *flags, "unit.cpp", "-o", "unit.so"]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if result.returncode:
            lines = [line for line in result.stderr.splitlines() if "error" in line] or result.stderr.splitlines()
            raise InfercError(f"{compiler.path} failed for {isa}: {lines[0] if lines else result.returncode}")
        os.replace(folder / "unit.so", target)
    return target
