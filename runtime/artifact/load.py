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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from inferc.arena import MemoryFormula
from inferc.config import HUB_ID
from inferc.cost.formulas import CostLog
from inferc.errors import ArtifactError
from inferc.manifest import COSTS, FORMAT_VERSION, MANIFEST, RECORDS, is_sealed
from inferc.manifest_types import (
    Config,
    CubinProgram,
    KvGroup,
    LaunchRecord,
    LibraryProgram,
    Manifest,
    Model,
    PlainProgram,
    Program,
    ProgramEntry,
    StoredWeight,
    read_typed,
)
from inferc.runtime.artifact.checks import manifest_fault, program_fault, records_fault
from inferc.runtime.artifact.files import AGAIN, ChunkSums, WeightsCheck, map_file, read_checked
from inferc.runtime.artifact.libraries import Library
from inferc.runtime.artifact.numpy_dtypes import NUMPY_DTYPES
from inferc.runtime.text.files import TextFiles
from inferc.signature import check_signature, read_trusted_keys
from inferc.system.json_text import parse_json
from inferc.system.resources import available_cores

log = logging.getLogger(__name__)

KEPT = ("kernels/", "tokenizer/")  # the folders of files whose checked bytes are kept for later use


@dataclass(frozen=True)
class Artifact:
    """A loaded artifact, or one rank of it.

    `ranks` lists all ranks; the first one is loaded unless the caller chose another. manifest is engine.json, `entry`
    its entry of this rank's program, and `program` the file of that program, as far as manifest_types.py names their
    fields; `manifest_json` and `program_json` return all that is in the files.
    """

    path: Path
    manifest: Manifest
    entry: ProgramEntry
    program: Program
    records: Mapping[str, Sequence[LaunchRecord]]  # how the GPU kernels are launched, by chip
    maps: dict[str, mmap.mmap]  # the mapped weight files, by file name
    sums: dict[str, ChunkSums] = field(repr=False)  # the digests of the mapped files, by file name
    contents: dict[str, bytes] = field(repr=False, compare=False)  # the checked bytes of kernels and tokenizer, by name
    manifest_bytes: bytes = field(repr=False, compare=False)  # engine.json as it was read
    # All ranks, ordered by ep rank, pipeline stage and tp rank; only this one if the model is not partitioned.
    ranks: list[Artifact] = field(repr=False, compare=False)

    @property
    def model(self) -> Model:
        """The facts about the model that the runtime needs, such as vocab_size and the generation defaults."""
        return self.manifest.model

    @property
    def config(self) -> Config:
        """The resolved compile config."""
        return self.manifest.config

    @property
    def weights(self) -> Sequence[StoredWeight]:
        """The stored weights, in the order of the step's weight table."""
        return self.program.weights

    @property
    def kv_groups(self) -> Sequence[KvGroup]:
        """The KV groups of this rank; `whole_kv_groups` has those of all ranks together."""
        return self.entry.kv_groups

    @property
    def whole_kv_groups(self) -> Sequence[KvGroup]:
        """The KV groups of all ranks together, which a scheduler counts in: `bytes_per_token` and `layers` are summed.

        Ranks that hold parts of the same layers have equal groups; pipeline stages may have different ones.
        """
        found: dict[tuple[Any, ...], KvGroup] = {}
        for group in (group for rank in self.ranks for group in rank.kv_groups):
            whole = found.get(group_key(group))
            if whole is not None:
                num_bytes = whole.bytes_per_token + group.bytes_per_token
                layers = sorted({*whole.layers, *group.layers})
                group = msgspec.structs.replace(whole, layers=layers, bytes_per_token=num_bytes)
            found[group_key(group)] = group
        return list(found.values())

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def num_logits(self) -> int:
        """The number of tokens that a row of logits is over: a head may draft some of the vocabulary only."""
        return self.vocab_size if self.model.head is None else self.model.head.num_logits

    @property
    def block_size(self) -> int:
        return self.config.block_size

    @property
    def max_model_len(self) -> int:
        return self.config.max_model_len

    @property
    def memory(self) -> MemoryFormula:
        """The formula of the arena's size."""
        return self.entry.memory.arena

    @property
    def kv_bytes_per_token(self) -> int:
        return self.entry.memory.kv_bytes_per_token

    @property
    def weights_bytes(self) -> int:
        """The bytes that this rank reads of the weight files.

        A tensor shared by ranks or by names counts once per rank.
        """
        return sum({(weight.file, weight.offset): weight.num_bytes for weight in self.weights}.values())

    @property
    def isas(self) -> tuple[str, ...]:
        """The instruction sets that the artifact has a library for, best first."""
        return tuple(self.entry.libraries)

    @property
    def tokenizer(self) -> TextFiles:
        """The files for text: tokenizer.json, and chat_template.jinja and others if the model has them."""
        files = {name: data for name, data in self.contents.items() if name.startswith("tokenizer/")}
        return TextFiles(self.path / "tokenizer", {name.removeprefix("tokenizer/"): files[name] for name in files})

    @property
    def cubins(self) -> Mapping[str, str]:
        """The folder of the GPU kernels, by chip."""
        return self.entry.cubins

    def library(self, isa: str) -> Library:
        """Return the compiled step for `isa`, as the bytes that were checked when the artifact was loaded."""
        libraries = self.entry.libraries
        if isa not in libraries:
            have = ", ".join(libraries) or "none"
            raise ArtifactError(f"{self.path} has no library for isa {isa}; it has: {have}")
        return Library(self.path / libraries[isa], self.contents[libraries[isa]])

    def read(self, name: str) -> bytes:
        """Return the checked contents of a file that has a SHA-256 in the manifest. Raises ArtifactError."""
        entry = self.manifest.files.get(name)
        if entry is None or entry.sha256 is None:
            raise ArtifactError(f"{self.path / MANIFEST} names no {name} that has a sha256; {AGAIN}")
        return self.contents.get(name) or read_checked(self.path, name, entry)

    def read_json(self, name: str) -> Any:
        """Return the parsed contents of a JSON file. Raises ArtifactError."""
        try:
            return parse_json(self.read(name))
        except ValueError as error:
            raise ArtifactError(f"{self.path / name} is not JSON: {error}; {AGAIN}") from None

    def manifest_json(self) -> dict[str, Any]:
        """Return engine.json as parsed, with the fields that only people and other tools read."""
        return dict(parse_json(self.manifest_bytes))

    def program_json(self) -> dict[str, Any]:
        """Return the program's file as parsed, with the fields that only the compiler reads. Raises ArtifactError."""
        return dict(self.read_json(self.entry.file))

    def costs(self) -> CostLog:
        """Return the costs of the program after each compiler pass.

        Raises ArtifactError, also if the artifact has none.
        """
        data = self.read(COSTS)
        try:
            return CostLog.load(data)
        except ValueError as error:
            raise ArtifactError(f"{self.path / COSTS} is not of the format: {error}; {AGAIN}") from None

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
        dtype = NUMPY_DTYPES[weight.dtype]
        flat = np.frombuffer(self.maps[weight.file], dtype, count, weight.offset)
        return flat.reshape(weight.physical_shape)

    def cache_identity(self, kv_evict: str | None = None) -> tuple[str, str]:
        """Return what identifies this artifact's K and V: its hash and the KV dtypes.

        Another artifact of the same model may compute other bits, so the hash is part of it. kv_evict: as in
        EngineConfig; with it, K and V depend on which tokens had been evicted when they were computed.
        """
        kv_dtype = ",".join(group.dtype for group in self.whole_kv_groups)
        return self.manifest.sha256, kv_dtype if kv_evict is None else f"{kv_dtype} {kv_evict}"

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
    data, manifest = _read_manifest(folder)
    if manifest_sha256 not in (None, manifest.sha256):
        raise ArtifactError(
            f"{folder} is another artifact than before: found sha256 {manifest.sha256[:16]}…, expected"
            f" {str(manifest_sha256)[:16]}…; put that one back, or load the model again"
        )
    _check_target(folder, manifest, target)
    if to_run:
        _check_host(folder, manifest)
    sums = {name: ChunkSums("xxh3_128", tuple(each.xxh3_128)) for name, each in manifest.files.items() if each.xxh3_128}
    if trusted_keys is not None:
        keys = read_trusted_keys(Path(trusted_keys))
        of_chunks = {name: each.of_chunks for name, each in sums.items()}
        signer, statement = check_signature(folder, data, of_chunks, keys, Path(trusted_keys))
        sums = {name: ChunkSums("sha256", tuple(each)) for name, each in statement.chunks.items()}
        log.info("%s is signed by %s", folder, signer.name)
    contents = {name: read_checked(folder, name, each) for name, each in manifest.files.items() if each.sha256}
    maps = {name: map_file(folder, name, each) for name, each in manifest.files.items() if each.xxh3_128}
    kept = {name: data for name, data in contents.items() if name.startswith(KEPT)}
    ranks: list[Artifact] = []
    for entry in manifest.programs:
        program = _read_program(folder, entry, contents[entry.file], maps)
        records = _read_records(folder, entry, contents)
        ranks.append(Artifact(folder, manifest, entry, program, records, maps, sums, kept, data, ranks))
    return ranks[0]


def group_key(group: KvGroup) -> tuple[Any, ...]:
    """Return the key that KV groups of different ranks share if one scheduler's blocks stand for all of them."""
    return group.kind, group.window, group.num_kv_heads, group.head_dim, group.dtype


def _read_program(folder: Path, entry: ProgramEntry, data: bytes, maps: Mapping[str, mmap.mmap]) -> Program:
    """Parse a program.json and check it against manifest_types.Program. Raises ArtifactError."""
    kind: type[Program] = CubinProgram if entry.cubins else LibraryProgram if entry.libraries else PlainProgram
    try:
        program: Program = read_typed(data, kind)
        fault = program_fault(program, entry, {name: len(data) for name, data in maps.items()})
    except ValueError as error:
        fault = str(error)
    if fault is not None:
        raise ArtifactError(f"{folder / entry.file} is not of the format: {fault}; {AGAIN}")
    return program


def _read_records(
    folder: Path, entry: ProgramEntry, contents: Mapping[str, bytes]
) -> dict[str, Sequence[LaunchRecord]]:
    """Parse the launch records of each chip. Raises ArtifactError, also for a record whose code is missing."""
    records: dict[str, Sequence[LaunchRecord]] = {}
    for chip, kernels in entry.cubins.items():
        name = f"{kernels}/{RECORDS}"
        try:
            records[chip] = read_typed(contents[name], list[LaunchRecord])
            fault = records_fault(records[chip], kernels, contents)
        except ValueError as error:
            fault = str(error)
        if fault is not None:
            raise ArtifactError(f"{folder / name} is not of the format: {fault}; {AGAIN}")
    return records


def _read_manifest(folder: Path) -> tuple[bytes, Manifest]:
    """Return the bytes of engine.json, and what they say."""
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
        found = parse_json(data)
    except ValueError:
        raise ArtifactError(f"{path} is damaged: it is not JSON; {AGAIN}") from None
    if not isinstance(found, dict) or "format_version" not in found:
        raise ArtifactError(f"{path} has no format_version: it is damaged or not inferc's; {AGAIN}")
    version = found["format_version"]
    if version != FORMAT_VERSION:
        raise ArtifactError(
            f"{path} is of format version {version!r:.40}, this inferc reads {FORMAT_VERSION};"
            " compile the model again, or run it with the inferc that wrote it"
        )
    if not is_sealed(data):
        raise ArtifactError(f"{path} is damaged or was edited: its sha256 does not match; {AGAIN}")
    try:
        manifest = read_typed(data, Manifest)
        fault = manifest_fault(manifest)
    except ValueError as error:
        fault = str(error)
    if fault is not None:
        raise ArtifactError(f"{path} is not of the format: {fault}; {AGAIN}")
    return data, manifest


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


def _check_target(folder: Path, manifest: Manifest, target: str | None) -> None:
    targets = manifest.targets
    if target is not None and target not in targets:
        raise ArtifactError(
            f"{folder} is compiled for {', '.join(targets)}, not for {target}; compile the model with --target {target}"
        )


def _check_host(folder: Path, manifest: Manifest) -> None:
    host, here = manifest.host, f"{platform.system()}-{platform.machine()}".lower()
    if host is not None and host != here:
        raise ArtifactError(f"{folder} has libraries for {host}, this machine is {here}; compile the model on {here}")
