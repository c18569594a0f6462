"""Load and check an artifact: numpy, xxhash and the standard library only.

Everything small or executable is read whole and checked before use (SHA-256). The weights are mapped, not read, and
checked by threads in the background (XXH3-128 per chunk) while the engine starts: `verify_weights().wait()` must have
returned before the first answer leaves.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import platform
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from inferc.config import EngineConfig, available_cores
from inferc.errors import ArtifactError
from inferc.manifest import (
    ALIGNMENT,
    CERTIFICATE,
    CHUNK_BYTES,
    FORMAT_VERSION,
    MANIFEST,
    TENSORRT_LAYERS,
    TENSORRT_PLAN,
    StoredWeight,
    align,
    holds_weights,
    is_sealed,
    segment_plan,
)

# numpy has neither: their bits are seen.
NUMPY_DTYPES = {"bfloat16": "uint16", "float8_e4m3fn": "uint8"}
AGAIN = "copy the artifact again, or compile it again"


@dataclass(frozen=True)
class MemoryFormula:
    """Bytes of a step's arena as a function of what a step may hold at most."""

    const: int
    per_token: int
    per_row: int
    per_seq: int
    per_thread: int

    def arena_bytes(self, num_tokens: int, num_rows: int, num_seqs: int, num_threads: int) -> int:
        """`const + …` for the configured maxima, each but the threads rounded up to a multiple of 64."""
        rows = self.per_token * align(num_tokens) + self.per_row * align(num_rows) + self.per_seq * align(num_seqs)
        return self.const + rows + self.per_thread * num_threads

    def reserved_bytes(self, num_tokens: int, num_seqs: int, num_threads: int) -> int:
        """What a runner reserves: scoring asks for a row for each token. Pages that no step touches take no memory."""
        return self.arena_bytes(num_tokens, num_tokens, num_seqs, num_threads)


@dataclass(frozen=True)
class Artifact:
    """A loaded artifact, or one rank of it: `ranks` has them all, of which this is the first if nobody chose another.

    manifest is engine.json, `entry` what it says of this rank's program, `program` that program's file, as parsed.
    """

    path: Path
    manifest: dict[str, Any]
    entry: dict[str, Any]
    program: dict[str, Any]
    weights: tuple[StoredWeight, ...]  # in the order of the step's weight table
    maps: dict[str, mmap.mmap]  # of the weight files, by name
    contents: dict[str, bytes] = field(
        repr=False, compare=False
    )  # of the kernels' files, as they were checked, by name
    ranks: list[Artifact] = field(
        repr=False, compare=False
    )  # by ep rank, stage, tp rank; only this one where the model is whole

    @property
    def model(self) -> dict[str, Any]:
        """What the runtime needs to know of the model: vocab_size, eos_token_ids, generation defaults, …"""
        return dict(self.manifest["model"])

    @property
    def config(self) -> dict[str, Any]:
        """The resolved compile config."""
        return dict(self.manifest["config"])

    @property
    def kv_groups(self) -> list[dict[str, Any]]:
        """Of this rank; `whole_kv_groups` has all ranks' together."""
        return list(self.entry["kv_groups"])

    @property
    def whole_kv_groups(self) -> list[dict[str, Any]]:
        """The groups of all ranks, of which `bytes_per_token` and `layers` are the sums: what a scheduler counts in.

        Ranks that hold parts of the same layers have equal groups; stages may have different ones.
        """
        found: dict[tuple[Any, ...], dict[str, Any]] = {}
        for rank in self.ranks:
            for group in rank.entry["kv_groups"]:
                whole = found.setdefault(group_key(group), {**group, "layers": [], "bytes_per_token": 0})
                whole["bytes_per_token"] += group["bytes_per_token"]
                whole["layers"] = sorted({*whole["layers"], *group["layers"]})
        return list(found.values())

    @property
    def block_size(self) -> int:
        return int(self.manifest["config"]["block_size"])

    @property
    def max_model_len(self) -> int:
        return int(self.manifest["config"]["max_model_len"])

    @property
    def memory(self) -> MemoryFormula:
        return MemoryFormula(**self.entry["memory"]["arena"])

    @property
    def kv_bytes_per_token(self) -> int:
        return int(self.entry["memory"]["kv_bytes_per_token"])

    @property
    def name_of_rank(self) -> str:
        """`tp 1, pp 0, ep 0`, of the sizes that are not 1; empty where the model is whole."""
        config = self.config
        sizes = {"tp": self.entry["tp_rank"], "pp": self.entry["pp_stage"], "ep": self.entry["ep_rank"]}
        return ", ".join(f"{name} {rank}" for name, rank in sizes.items() if config[name] > 1)

    @property
    def weights_bytes(self) -> int:
        """What this rank reads of the weight files; ranks may share a tensor, and names in one rank too."""
        return sum({(weight.file, weight.offset): weight.num_bytes for weight in self.weights}.values())

    @property
    def isas(self) -> tuple[str, ...]:
        """Instruction sets the artifact has a library for, best first."""
        return tuple(self.entry["libraries"])

    @property
    def tokenizer_folder(self) -> Path:
        """The folder of tokenizer.json, and of chat_template.jinja and generation_config.json where the model has them."""
        return self.path / "tokenizer"

    def library(self, isa: str) -> Path:
        """The compiled step for `isa`; its bytes were checked when the artifact was loaded."""
        libraries = self.entry["libraries"]
        if isa not in libraries:
            have = ", ".join(libraries) or "none"
            raise ArtifactError(f"{self.path} has no library for isa {isa}; it has: {have}")
        return self.path / str(libraries[isa])

    def read(self, name: str) -> bytes:
        """A file of it, small enough to be checked by its SHA-256. Raises ArtifactError."""
        return _read_checked(self.path, name, self.manifest["files"][name])

    def weight(self, name: str) -> NDArray[Any]:
        """The stored tensor `name`, in its physical shape: a read-only view of the mapped file, bfloat16 and fp8 as bits."""
        weight = next((weight for weight in self.weights if weight.name == name), None)
        if weight is None:
            raise KeyError(f"{self.path} has no weight {name!r}")
        return self.view(weight)

    def view(self, weight: StoredWeight) -> NDArray[Any]:
        """As `weight`, for a row of the table."""
        count = math.prod(weight.physical_shape)
        dtype = np.dtype(NUMPY_DTYPES.get(weight.dtype, weight.dtype))
        flat = np.frombuffer(self.maps[weight.file], dtype, count, weight.offset)
        return flat.reshape(weight.physical_shape)

    def verify_weights(self, num_threads: int | None = None) -> WeightsCheck:
        """Start checking every chunk of the weights in the background; wait for it before the first answer."""
        return WeightsCheck(self, num_threads or min(4, available_cores()))


class WeightsCheck:
    """A running check of the weights: threads that hash chunks, faulting their pages in on the way."""

    def __init__(self, artifact: Artifact, num_threads: int) -> None:
        self._artifact = artifact
        self._chunks = _chunks(artifact)
        self._lock = threading.Lock()
        self._error: Exception | None = None  # the first; a chunk that was not hashed is not checked
        self._threads = [
            threading.Thread(target=self._run, name=f"verify-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Block until every chunk is checked; raise ArtifactError naming the file if one is damaged or unreadable."""
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while self._error is None:
                with self._lock:
                    chunk = next(self._chunks, None)
                if chunk is None:
                    return
                self._check(*chunk)
        except Exception as error:  # noqa: BLE001  (lost on a thread: `wait` would pass what nobody checked)
            self._error = self._error or error

    def _check(self, name: str, start: int, digest: str) -> None:
        path = self._artifact.path / name
        try:
            with memoryview(self._artifact.maps[name]) as whole, whole[start : start + CHUNK_BYTES] as data:
                found = xxhash.xxh3_128_hexdigest(data)
        except OSError as error:
            raise ArtifactError(f"cannot read {path}: {error.strerror}") from error
        if found != digest:
            raise ArtifactError(f"{path} is damaged within bytes {start} to {start + CHUNK_BYTES}; {AGAIN}")


def load_artifact(path: str | os.PathLike[str], *, target: str | None = None, to_run: bool = True) -> Artifact:
    """Open the artifact at `path`, checking all of it but the contents of the weights (see `verify_weights`).

    target: what it is to run on, if the caller has a choice in mind. to_run: whether it must be for this kind of machine.
    Raises ArtifactError, in one line: no artifact, another format version, a damaged, truncated or missing file, or
    an artifact for another target or kind of machine.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    _check_target(folder, manifest, target)
    if to_run:
        _check_host(folder, manifest)
    contents = {
        name: _read_checked(folder, name, entry) for name, entry in manifest["files"].items() if "sha256" in entry
    }
    maps = {name: _map(folder, name, entry) for name, entry in manifest["files"].items() if "xxh3_128" in entry}
    kernels = {name: data for name, data in contents.items() if name.startswith("kernels/")}
    ranks: list[Artifact] = []
    for entry in manifest["programs"]:
        program = json.loads(contents[entry["file"]])
        ranks.append(
            Artifact(
                *(folder, manifest, entry, program, _weight_table(folder, entry, program, maps)),
                *(maps, kernels, ranks),
            )
        )
    return ranks[0]


def group_key(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """What KV groups of different ranks have in common where one scheduler's blocks stand for all of them."""
    return tuple(group[name] for name in ("kind", "window", "num_kv_heads", "head_dim", "dtype"))


def _weight_table(
    folder: Path, entry: Mapping[str, Any], program: Mapping[str, Any], maps: Mapping[str, mmap.mmap]
) -> tuple[StoredWeight, ...]:
    rows = [
        StoredWeight(**{**row, "shape": tuple(row["shape"]), "physical_shape": tuple(row["physical_shape"])})
        for row in program["weights"]
    ]
    for row in rows:
        if row.file not in maps or row.offset % ALIGNMENT or row.offset + row.num_bytes > len(maps[row.file]):
            raise ArtifactError(f"{folder / entry['file']} places weight {row.name} outside of {row.file}; {AGAIN}")
    return tuple(rows)


def read_manifest(folder: Path) -> dict[str, Any]:
    """engine.json of the artifact at `folder`, its version and its own digest checked."""
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
        manifest = json.loads(data)
    except FileNotFoundError:
        raise ArtifactError(_why_no_manifest(folder)) from None
    except NotADirectoryError:
        raise ArtifactError(f"{folder} is a file, expected the folder that `inferc compile -o` wrote") from None
    except OSError as error:
        raise ArtifactError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise ArtifactError(f"{path} is damaged: it is not JSON; {AGAIN}") from None
    if not isinstance(manifest, dict) or "format_version" not in manifest:
        raise ArtifactError(f"{path} has no format_version: it is damaged or not inferc's; {AGAIN}")
    version = manifest["format_version"]
    if version != FORMAT_VERSION:
        raise ArtifactError(
            f"{path} is of format version {version}, this inferc reads {FORMAT_VERSION};"
            " compile the model again, or run it with the inferc that wrote it"
        )
    if not is_sealed(data):
        raise ArtifactError(f"{path} is damaged or was edited: its sha256 does not match; {AGAIN}")
    for name in manifest["files"]:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ArtifactError(f"{path} names {name!r}, which is outside of the artifact")
    return dict(manifest)


def inspect_artifact(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What `inferc inspect --json` prints: sizes, kernels and their resources, the certificate. Reads no weights."""
    artifact = load_artifact(path, to_run=False)
    manifest = artifact.manifest
    defaults = EngineConfig()
    num_threads = available_cores()
    seqs, tokens = defaults.max_num_seqs, defaults.token_budget(manifest["targets"][0].partition(":")[0])
    certificate = artifact.path / CERTIFICATE

    def arena_bytes(rank: Artifact) -> int:
        return rank.memory.reserved_bytes(tokens, seqs, num_threads)

    return {
        "format_version": manifest["format_version"],
        "producer": manifest["producer"],
        "targets": manifest["targets"],
        "weights_bytes": sum(entry["bytes"] for name, entry in manifest["files"].items() if holds_weights(name, entry)),
        "arena_bytes": sum(map(arena_bytes, artifact.ranks)),
        "arena_for": {"num_tokens": tokens, "num_rows": tokens, "num_seqs": seqs, "num_threads": num_threads},
        "kv_bytes_per_token": sum(rank.kv_bytes_per_token for rank in artifact.ranks),
        "kv_groups": artifact.whole_kv_groups,
        "libraries": artifact.entry["libraries"],
        "cubins": artifact.entry.get("cubins", {}),
        "programs": [
            {
                **{name: rank.entry[name] for name in ("name", "tp_rank", "pp_stage", "ep_rank", "kv_groups")},
                "libraries": rank.entry["libraries"],
                "weights_bytes": rank.weights_bytes,
                "arena_bytes": arena_bytes(rank),
                "kv_bytes_per_token": rank.kv_bytes_per_token,
            }
            for rank in artifact.ranks
        ],
        "model": manifest["model"],
        "chat": _chat_facts(artifact),
        "config": manifest["config"],
        "passes": manifest["passes"],
        "kernels": manifest["kernels"],
        **({"tensorrt": _plan_facts(artifact)} if "tensorrt" in manifest else {}),
        "certificate": json.loads(certificate.read_bytes()) if certificate.exists() else None,
    }


def _chat_facts(artifact: Artifact) -> dict[str, Any] | None:
    """The form in which the chat template reads messages (inferc.chat_form); None where there is none."""
    name = "tokenizer/golden_chat.json"
    golden = json.loads(artifact.read(name)) if name in artifact.manifest["files"] else {}
    return golden.get("form")


def _plan_facts(artifact: Artifact) -> dict[str, Any]:
    """Of TensorRT plans: what built them, for what, their size, and how many layers of which kind each was built from."""
    facts, layers = artifact.manifest["tensorrt"], json.loads((artifact.path / TENSORRT_LAYERS).read_bytes())
    if "plans" not in facts:
        return {**facts, **_of_plan(artifact, TENSORRT_PLAN, layers)}
    rows = [{**row, **_of_plan(artifact, segment_plan(row["name"]), layers[row["name"]])} for row in facts["plans"]]
    return {**facts, "plans": rows}


def _of_plan(artifact: Artifact, file: str, layers: list[dict[str, Any]]) -> dict[str, Any]:
    kinds = Counter(str(layer["kind"]) for layer in layers)
    return {"plan_bytes": len(artifact.maps[file]), "layers": dict(kinds.most_common())}


def _why_no_manifest(folder: Path) -> str:
    if not folder.exists():
        return f"no artifact at {folder}: there is no such folder; make it with `inferc compile MODEL -o {folder}`"
    if (folder / "config.json").exists():
        return f"{folder} is a Hugging Face model; compile it first: `inferc compile {folder} -o OUT`, then use OUT"
    return f"{folder} is not an artifact: it has no {MANIFEST}; make one with `inferc compile MODEL -o OUT`"


def _check_target(folder: Path, manifest: dict[str, Any], target: str | None) -> None:
    targets = manifest["targets"]
    if target is not None and target not in targets:
        raise ArtifactError(
            f"{folder} is compiled for {', '.join(targets)}, not for {target}; compile the model with --target {target}"
        )


def _check_host(folder: Path, manifest: dict[str, Any]) -> None:
    host, here = manifest["host"], f"{platform.system()}-{platform.machine()}".lower()
    if host is not None and host != here:
        raise ArtifactError(f"{folder} has libraries for {host}, this machine is {here}; compile the model on {here}")


def _checked_size(folder: Path, name: str, entry: dict[str, Any]) -> Path:
    path = folder / name
    try:
        size = path.stat().st_size
    except OSError:
        raise ArtifactError(f"{path} is missing, though {MANIFEST} names it; {AGAIN}") from None
    if size != entry["bytes"]:
        kind = "truncated" if size < entry["bytes"] else "too long"
        raise ArtifactError(f"{path} is {kind}: it has {size} bytes, expected {entry['bytes']}; {AGAIN}")
    return path


def _read_checked(folder: Path, name: str, entry: dict[str, Any]) -> bytes:
    path = _checked_size(folder, name, entry)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"cannot read {path}: {error.strerror}") from None
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise ArtifactError(f"{path} is damaged: its sha256 does not match {MANIFEST}; {AGAIN}")
    return data


def _map(folder: Path, name: str, entry: dict[str, Any]) -> mmap.mmap:
    path = _checked_size(folder, name, entry)
    try:
        with path.open("rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ArtifactError(f"cannot map {path}: {error.strerror}") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _chunks(artifact: Artifact) -> Iterator[tuple[str, int, str]]:
    """(file, first byte, digest) of every chunk, in file order: the order in which a step reads them."""
    for name, entry in artifact.manifest["files"].items():
        for index, digest in enumerate(entry.get("xxh3_128", ())):
            yield name, index * CHUNK_BYTES, digest
