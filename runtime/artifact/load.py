"""The loading and checking of an artifact, with numpy, xxhash, msgspec and the standard library only.

Everything small or executable is read whole and checked before use (SHA-256), and the bytes that were checked are the
ones used. The weights are mapped, not read, and threads check them in the background (XXH3-128 per chunk) while the
engine starts: `verify_weights().wait()` must have returned before the first response is sent.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferc.arena import align_rows
from inferc.codegen.triton.aot.launch import RECORDS
from inferc.config import HUB_ID, EngineConfig, available_cores
from inferc.cost.formulas import CostLog
from inferc.errors import ArtifactError
from inferc.manifest import (
    CERTIFICATE,
    COSTS,
    FORMAT_VERSION,
    MANIFEST,
    TENSORRT_LAYERS,
    TENSORRT_PLAN,
    StoredWeight,
    holds_weights,
    is_sealed,
    segment_plan,
)
from inferc.manifest_types import Manifest, Program, ProgramEntry, Record, read_typed
from inferc.runtime.artifact.checks import manifest_fault, program_fault, records_fault
from inferc.runtime.artifact.files import AGAIN, ChunkSums, WeightsCheck, map_file, read_checked
from inferc.runtime.artifact.libraries import Library
from inferc.runtime.text.files import TextFiles
from inferc.signature import check_signature, read_trusted_keys, signature_facts
from inferc.system.json_text import parse_json

log = logging.getLogger(__name__)

# numpy has no bfloat16 and no fp8, so their bits are viewed as unsigned integers.
NUMPY_DTYPES = {"bfloat16": "uint16", "float8_e4m3fn": "uint8"}
KEPT = ("kernels/", "tokenizer/")  # the folders of files whose checked bytes are kept for later use


@dataclass(frozen=True)
class MemoryFormula:
    """The size of a step's arena in bytes, as a linear function of the most that a step may hold."""

    const: int
    per_token: int
    per_row: int
    per_seq: int
    per_thread: int

    def arena_bytes(self, num_tokens: int, num_rows: int, num_seqs: int, num_threads: int) -> int:
        """Return the bytes for these maxima; all but the threads are rounded up to a multiple of 64."""
        rows = (
            self.per_token * align_rows(num_tokens)
            + self.per_row * align_rows(num_rows)
            + self.per_seq * align_rows(num_seqs)
        )
        return self.const + rows + self.per_thread * num_threads

    def reserved_bytes(self, num_tokens: int, num_seqs: int, num_threads: int) -> int:
        """Return the bytes that a runner reserves: scoring needs a row per token. Untouched pages take no memory."""
        return self.arena_bytes(num_tokens, num_tokens, num_seqs, num_threads)


@dataclass(frozen=True)
class Artifact:
    """A loaded artifact, or one rank of it.

    `ranks` lists all ranks; the first one is loaded unless the caller chose another. manifest is engine.json, `entry`
    its entry of this rank's program, and `program` the parsed file of that program; all three have the types of
    manifest_types.py.
    """

    path: Path
    manifest: dict[str, Any]
    entry: dict[str, Any]
    program: dict[str, Any]
    weights: tuple[StoredWeight, ...]  # in the order of the step's weight table
    maps: dict[str, mmap.mmap]  # the mapped weight files, by file name
    sums: dict[str, ChunkSums] = field(repr=False)  # the digests of the mapped files, by file name
    contents: dict[str, bytes] = field(repr=False, compare=False)  # the checked bytes of kernels and tokenizer, by name
    manifest_bytes: bytes = field(repr=False, compare=False)  # engine.json as it was read
    # All ranks, ordered by ep rank, pipeline stage and tp rank; only this one if the model is not partitioned.
    ranks: list[Artifact] = field(repr=False, compare=False)

    @property
    def model(self) -> dict[str, Any]:
        """The facts about the model that the runtime needs, such as vocab_size and the generation defaults.

        It is the manifest's "model" entry.
        """
        return dict(self.manifest["model"])

    @property
    def config(self) -> dict[str, Any]:
        """The resolved compile config."""
        return dict(self.manifest["config"])

    @property
    def kv_groups(self) -> list[dict[str, Any]]:
        """The KV groups of this rank; `whole_kv_groups` has those of all ranks together."""
        return list(self.entry["kv_groups"])

    @property
    def whole_kv_groups(self) -> list[dict[str, Any]]:
        """The KV groups of all ranks together, which a scheduler counts in: `bytes_per_token` and `layers` are summed.

        Ranks that hold parts of the same layers have equal groups; pipeline stages may have different ones.
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
    def weights_bytes(self) -> int:
        """The bytes that this rank reads of the weight files.

        A tensor shared by ranks or by names counts once per rank.
        """
        return sum({(weight.file, weight.offset): weight.num_bytes for weight in self.weights}.values())

    @property
    def isas(self) -> tuple[str, ...]:
        """The instruction sets that the artifact has a library for, best first."""
        return tuple(self.entry["libraries"])

    @property
    def tokenizer(self) -> TextFiles:
        """The files for text: tokenizer.json, and chat_template.jinja and others if the model has them."""
        files = {name: data for name, data in self.contents.items() if name.startswith("tokenizer/")}
        return TextFiles(self.path / "tokenizer", {name.removeprefix("tokenizer/"): files[name] for name in files})

    def library(self, isa: str) -> Library:
        """Return the compiled step for `isa`, as the bytes that were checked when the artifact was loaded."""
        libraries = self.entry["libraries"]
        if isa not in libraries:
            have = ", ".join(libraries) or "none"
            raise ArtifactError(f"{self.path} has no library for isa {isa}; it has: {have}")
        return Library(self.path / libraries[isa], self.contents[libraries[isa]])

    def read(self, name: str) -> bytes:
        """Return the checked contents of a file that has a SHA-256 in the manifest. Raises ArtifactError."""
        if "sha256" not in self.manifest["files"].get(name, ()):
            raise ArtifactError(f"{self.path / MANIFEST} names no {name} that has a sha256; {AGAIN}")
        return self.contents.get(name) or read_checked(self.path, name, self.manifest["files"][name])

    def read_json(self, name: str) -> Any:
        """Return the parsed contents of a JSON file. Raises ArtifactError."""
        try:
            return parse_json(self.read(name))
        except ValueError as error:
            raise ArtifactError(f"{self.path / name} is not JSON: {error}; {AGAIN}") from None

    def costs(self) -> CostLog:
        """Return the costs of the program after each compiler pass.

        Raises ArtifactError, also if the artifact has none.
        """
        data = self.read_json(COSTS)
        try:
            return CostLog.from_json(data)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise ArtifactError(f"{self.path / COSTS} is not of the format: {why}; {AGAIN}") from None

    def weight(self, name: str) -> NDArray[Any]:
        """Return the stored tensor `name` in its physical shape, as a read-only view of the mapped file.

        bfloat16 and fp8 are returned as their bits.
        """
        weight = next((weight for weight in self.weights if weight.name == name), None)
        if weight is None:
            raise KeyError(f"{self.path} has no weight {name!r}")
        return self.view(weight)

    def view(self, weight: StoredWeight) -> NDArray[Any]:
        """Return the stored tensor of a row of the weight table, like `weight`."""
        count = math.prod(weight.physical_shape)
        dtype = np.dtype(NUMPY_DTYPES.get(weight.dtype, weight.dtype))
        flat = np.frombuffer(self.maps[weight.file], dtype, count, weight.offset)
        return flat.reshape(weight.physical_shape)

    def cache_identity(self, kv_evict: str | None = None) -> tuple[str, str]:
        """Return what identifies this artifact's K and V: its hash and the KV dtypes.

        Another artifact of the same model may compute other bits, so the hash is part of it. kv_evict: as in
        EngineConfig; with it, K and V depend on which tokens had been evicted when they were computed.
        """
        kv_dtype = ",".join(str(group["dtype"]) for group in self.whole_kv_groups)
        return str(self.manifest["sha256"]), kv_dtype if kv_evict is None else f"{kv_dtype} {kv_evict}"

    def verify_weights(self, num_threads: int | None = None) -> WeightsCheck:
        """Start checking every chunk of the weights in the background.

        Wait for the result before the first response.
        """
        return WeightsCheck(self.path, self.maps, self.sums, num_threads or min(4, available_cores()))


def load_artifact(
    path: str | os.PathLike[str],
    *,
    target: str | None = None,
    to_run: bool = True,
    manifest_sha256: str | None = None,
    trusted_keys: str | os.PathLike[str] | None = None,
) -> Artifact:
    """Open the artifact at `path` and check all of it except the contents of the weights (see `verify_weights`).

    - target: the target to run on, if the caller has chosen one.
    - to_run: whether the artifact must be for this kind of machine.
    - manifest_sha256: the digest that the manifest must have, if the caller has loaded the artifact before.
    - trusted_keys: a file of keys, one of which must have signed the artifact; its weights are then checked by SHA-256.

    Raises ArtifactError, in one line: no artifact, another format version, a damaged, truncated or missing file, or an
    artifact for another target or kind of machine.
    """
    folder = Path(path)
    data, manifest, typed = _read_manifest(folder)
    if manifest_sha256 not in (None, manifest["sha256"]):
        raise ArtifactError(
            f"{folder} is another artifact than before: found sha256 {manifest['sha256'][:16]}…, expected"
            f" {str(manifest_sha256)[:16]}…; put that one back, or load the model again"
        )
    _check_target(folder, manifest, target)
    if to_run:
        _check_host(folder, manifest)
    sums = {name: ChunkSums("xxh3_128", tuple(each.xxh3_128)) for name, each in typed.files.items() if each.xxh3_128}
    if trusted_keys is not None:
        keys = read_trusted_keys(Path(trusted_keys))
        of_chunks = {name: each.of_chunks for name, each in sums.items()}
        signer, statement = check_signature(folder, data, of_chunks, keys, Path(trusted_keys))
        sums = {name: ChunkSums("sha256", tuple(each)) for name, each in statement.chunks.items()}
        log.info("%s is signed by %s", folder, signer.name)
    contents = {name: read_checked(folder, name, each) for name, each in manifest["files"].items() if "sha256" in each}
    maps = {name: map_file(folder, name, each) for name, each in manifest["files"].items() if "xxh3_128" in each}
    kept = {name: data for name, data in contents.items() if name.startswith(KEPT)}
    ranks: list[Artifact] = []
    for entry, types in zip(manifest["programs"], typed.programs, strict=True):
        program = _read_program(folder, types, contents[entry["file"]], maps)
        _check_records(folder, types, contents)
        ranks.append(Artifact(folder, manifest, entry, program, _weight_table(program), maps, sums, kept, data, ranks))
    return ranks[0]


def group_key(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the key that KV groups of different ranks share if one scheduler's blocks stand for all of them."""
    return tuple(group[name] for name in ("kind", "window", "num_kv_heads", "head_dim", "dtype"))


def _read_program(folder: Path, entry: ProgramEntry, data: bytes, maps: Mapping[str, mmap.mmap]) -> dict[str, Any]:
    """Parse a program.json and check it against manifest_types.Program. Raises ArtifactError."""
    try:
        program, typed = read_typed(data, Program)
        fault = program_fault(typed, entry, {name: len(data) for name, data in maps.items()})
    except ValueError as error:
        fault = str(error)
    if fault is not None:
        raise ArtifactError(f"{folder / entry.file} is not of the format: {fault}; {AGAIN}")
    return program


def _check_records(folder: Path, entry: ProgramEntry, contents: Mapping[str, bytes]) -> None:
    """Raise ArtifactError for launch records that are not of type manifest_types.Record, or whose code is missing."""
    for kernels in entry.cubins.values():
        name = f"{kernels}/{RECORDS}"
        try:
            fault = records_fault(read_typed(contents[name], list[Record])[1], kernels, contents)
        except ValueError as error:
            fault = str(error)
        if fault is not None:
            raise ArtifactError(f"{folder / name} is not of the format: {fault}; {AGAIN}")


def _weight_table(program: Mapping[str, Any]) -> tuple[StoredWeight, ...]:
    return tuple(
        StoredWeight(**{**row, "shape": tuple(row["shape"]), "physical_shape": tuple(row["physical_shape"])})
        for row in program["weights"]
    )


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read engine.json of the artifact at `folder`, and check its version, its own digest and its types."""
    return _read_manifest(folder)[1]


def _read_manifest(folder: Path) -> tuple[bytes, dict[str, Any], Manifest]:
    """Return the bytes of engine.json, its parsed contents, and the same as a typed Manifest."""
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ArtifactError(_why_no_manifest(folder)) from None
    except NotADirectoryError:
        raise ArtifactError(f"{folder} is a file, expected the folder that `inferc compile -o` wrote") from None
    except OSError as error:
        raise ArtifactError(f"cannot read {path}: {error.strerror}") from None
    try:
        manifest = parse_json(data)
    except ValueError:
        raise ArtifactError(f"{path} is damaged: it is not JSON; {AGAIN}") from None
    if not isinstance(manifest, dict) or "format_version" not in manifest:
        raise ArtifactError(f"{path} has no format_version: it is damaged or not inferc's; {AGAIN}")
    version = manifest["format_version"]
    if version != FORMAT_VERSION:
        raise ArtifactError(
            f"{path} is of format version {version!r:.40}, this inferc reads {FORMAT_VERSION};"
            " compile the model again, or run it with the inferc that wrote it"
        )
    if not is_sealed(data):
        raise ArtifactError(f"{path} is damaged or was edited: its sha256 does not match; {AGAIN}")
    try:
        manifest, typed = read_typed(data, Manifest)
        fault = manifest_fault(typed)
    except ValueError as error:
        fault = str(error)
    if fault is not None:
        raise ArtifactError(f"{path} is not of the format: {fault}; {AGAIN}")
    return data, manifest, typed


def inspect_artifact(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what `inferc inspect --json` prints: sizes, kernels and their resources, the certificate.

    It reads no weights.
    """
    artifact = load_artifact(path, to_run=False)
    manifest = artifact.manifest
    defaults = EngineConfig()
    num_threads = available_cores()
    seqs, tokens = defaults.max_num_seqs, defaults.token_budget(manifest["targets"][0])

    def arena_bytes(rank: Artifact) -> int:
        return rank.memory.reserved_bytes(tokens, seqs, num_threads)

    return {
        "format_version": manifest["format_version"],
        "signature": signature_facts(artifact.path, artifact.manifest_bytes),
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
        "certificate": artifact.read_json(CERTIFICATE) if CERTIFICATE in manifest["files"] else None,
    }


def _chat_facts(artifact: Artifact) -> dict[str, Any] | None:
    """Return the form in which the chat template reads messages (inferc.chat_form), or None without a template."""
    name = "tokenizer/golden_chat.json"
    golden = artifact.read_json(name) if name in artifact.manifest["files"] else {}
    return golden.get("form") if isinstance(golden, dict) else None


def _plan_facts(artifact: Artifact) -> dict[str, Any]:
    """Return the facts of TensorRT plans: their builder, their chip, their size, and their layers counted by kind."""
    facts, layers = artifact.manifest["tensorrt"], artifact.read_json(TENSORRT_LAYERS)
    if "plans" not in facts:
        return {**facts, **_of_plan(artifact, TENSORRT_PLAN, layers)}
    rows = [{**row, **_of_plan(artifact, segment_plan(row["name"]), layers[row["name"]])} for row in facts["plans"]]
    return {**facts, "plans": rows}


def _of_plan(artifact: Artifact, file: str, layers: list[dict[str, Any]]) -> dict[str, Any]:
    kinds = Counter(str(layer["kind"]) for layer in layers)
    return {"plan_bytes": len(artifact.maps[file]), "layers": dict(kinds.most_common())}


def _why_no_manifest(folder: Path) -> str:
    if not folder.exists():
        if HUB_ID.fullmatch(str(folder)) and not folder.parent.exists():
            return (
                f"no artifact at {folder}: there is no such folder; if it is a model of the hub, compile it first:"
                f" `inferc compile {folder} -o OUT`, then use OUT"
            )
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
