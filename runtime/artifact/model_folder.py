"""Folders of Hugging Face models in place of artifacts: they are compiled once, into a cache by their contents.

They are compiled for the machine's GPU where there is one, and otherwise for its processor. The cache lies in
`artifacts/` of INFERC_CACHE. An artifact's name there is that of the model's folder and a digest of all that it is
compiled from: every file of the folder that a compile reads, the target, and the version of inferc. Large files are
read once for that; a file whose size, time and inode are as they were has the contents that it had.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import logging
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferc import errors
from inferc.errors import ConfigError, InfercError
from inferc.manifest import FORMAT_VERSION, MANIFEST
from inferc.system.atomic_file import atomic_write
from inferc.system.env import cache_dir
from inferc.system.gpu import find_arch
from inferc.targets import DEFAULT_TARGET, TARGETS
from inferc.version import __version__

log = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
READ = (".json", ".jinja", ".model", ".safetensors", ".txt")  # the ends of the names of files that a compile may read
DIGESTS = "digests.json"
USED = "last-used"  # a file beside each artifact; when it was written is when the artifact was last asked for
CHUNK = 16 << 20


def is_model_folder(path: str | Path) -> bool:
    """Tell whether a path is the folder of a Hugging Face model, and of no artifact."""
    folder = Path(path).expanduser()
    return (folder / CONFIG_FILE).is_file() and not (folder / MANIFEST).exists()


def artifact_of(path: str | Path, target: str | None = None) -> Path:
    """Return the artifact at `path`, or for a model's folder the one in the cache, which is compiled if need be.

    target: what a folder is compiled for; None: `best_target`. Compiling takes a process of its own, whose progress
    goes to standard error, so that torch and the model leave this process's memory alone. Raises what the compile
    raises.
    """
    if not is_model_folder(path):
        return Path(path)
    folder = Path(path).expanduser().resolve()
    cache, target = _cache(), target or best_target()
    out = cache / f"{folder.name}-{digest_of(folder, target)[:16]}" / "artifact"
    with _locked(out.parent):
        if not (out / MANIFEST).is_file():
            log.info("%s: compiling it for %s into %s", folder, target, out)
            _compile(folder, out, target)
    _note(out.parent, folder)
    return out


def best_target() -> str:
    """Return the target that a model's folder is compiled for on this machine: its GPU, or else the CPU.

    A GPU that there are no kernels for, or whose kernels cannot be compiled here, is named in a warning.
    """
    arch = find_arch()
    if arch is None:
        return DEFAULT_TARGET
    gpu = next(spec for spec in TARGETS if spec.name == "cuda")
    if arch not in gpu.known_archs:
        log.warning("no kernels for this machine's GPU (%s): models' folders are compiled for the CPU", arch)
        return DEFAULT_TARGET
    if missing := [name for name in gpu.packages if importlib.util.find_spec(name) is None]:
        log.warning(
            "a GPU is here, and %s is not installed: models' folders are compiled for the CPU;"
            " pip install 'inferc[%s]' to use the GPU",
            missing[0],
            gpu.extra,
        )
        return DEFAULT_TARGET
    return f"{gpu.name}:{arch}"


def digest_of(folder: Path, target: str = DEFAULT_TARGET) -> str:
    """Return the digest of all that an artifact of a model's folder depends on."""
    files = sorted(each for each in folder.iterdir() if each.suffix in READ and each.is_file())
    known = _read_digests()
    digest = hashlib.sha256(json.dumps([__version__, FORMAT_VERSION, target]).encode())
    changed = False
    for file in files:
        facts = file.stat()
        identity = [facts.st_size, facts.st_mtime_ns, facts.st_ino]
        kept = known.get(str(file))
        if kept is None or kept[:-1] != identity:
            kept, changed = [*identity, _digest(file)], True
            known[str(file)] = kept
        digest.update(f"{file.name}:{kept[-1]}\n".encode())
    if changed:
        with suppress(ConfigError), atomic_write(_cache() / DIGESTS) as partial:
            partial.write_text(json.dumps(known))
    return digest.hexdigest()


def _read_digests() -> dict[str, list[Any]]:
    """Return what is known of files: their size, time, inode and digest, by path."""
    try:
        found = json.loads((_cache() / DIGESTS).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while part := stream.read(CHUNK):
            digest.update(part)
    return digest.hexdigest()


def _cache() -> Path:
    try:
        folder = cache_dir() / "artifacts"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"a model's folder is compiled into a cache, which cannot be written ({error}); set INFERC_CACHE, or"
            " compile it: inferc compile MODEL -o OUT"
        ) from None
    return folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time compile into `folder`; the others wait, and find what it made."""
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(folder: Path, out: Path, target: str) -> None:
    command = [sys.executable, "-m", "inferc.cli.compile_process", str(folder), str(out), target]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == 0:
        return
    try:
        said = json.loads(done.stdout)
        kind = getattr(errors, said["error"])
    except (ValueError, KeyError, AttributeError, TypeError):
        raise InfercError(f"{folder}: compiling it failed with exit code {done.returncode}") from None
    raise kind(said["message"])


def _note(entry: Path, folder: Path) -> None:
    with suppress(OSError):
        (entry / USED).write_text(json.dumps({"model": str(folder), "time": time.time()}))


# ----------------------------------------------------------------------------------------------- the cache


@dataclass(frozen=True)
class CachedArtifact:
    """An artifact of the cache. model: the folder that it was last asked for by; last_used: seconds since 1970."""

    name: str
    path: Path
    model: str
    bytes: int
    last_used: float


def cached_artifacts() -> list[CachedArtifact]:
    """Return the artifacts in the cache, those that were used last first."""
    found = []
    for entry in _cache().iterdir():
        if not (entry / "artifact" / MANIFEST).is_file():
            continue
        used: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            used = json.loads((entry / USED).read_text())
        size = sum(each.stat().st_size for each in (entry / "artifact").rglob("*") if each.is_file())
        found.append(
            CachedArtifact(
                entry.name, entry / "artifact", str(used.get("model", "")), size, float(used.get("time", 0.0))
            )
        )
    return sorted(found, key=lambda each: -each.last_used)


def prune(keep_bytes: int = 0, model: str | None = None) -> list[CachedArtifact]:
    """Remove artifacts from the cache, and return them: those used longest ago, until `keep_bytes` are left.

    model: remove only those of this folder. A server that has an artifact open goes on: its files are mapped.
    """
    wanted = None if model is None else str(Path(model).expanduser().resolve())
    candidates = [each for each in cached_artifacts() if wanted is None or each.model == wanted]
    removed, left = [], 0
    for each in candidates:
        left += each.bytes
        if left > keep_bytes:
            shutil.rmtree(each.path.parent, ignore_errors=True)
            removed.append(each)
    return removed
