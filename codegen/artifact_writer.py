"""The writer of an artifact's folder from lowered Programs: weights in their final layout, programs, the manifest.

Equal input gives equal bytes: no times, no absolute paths, every list in the program's own order.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import logging
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from inferc import manifest_types
from inferc.arena import MemoryFormula, MemoryPlan
from inferc.codegen.folder import OutputFolder
from inferc.codegen.values import outputs
from inferc.errors import ArtifactError, ConfigError
from inferc.ir import program as program_lib
from inferc.ir import weights as weight_lib
from inferc.ir.program import Program, dtype_name
from inferc.ir.weights import TensorReader, Weight
from inferc.manifest import (
    MANIFEST,
    PROGRAM,
    STORED_DTYPES,
    ChunkDigests,
    align,
    json_bytes,
    seal_manifest,
)
from inferc.manifest_types import (
    CubinPart,
    CubinProgram,
    FileEntry,
    Graph,
    Hidden,
    Input,
    KvGroup,
    KvIdentity,
    KvLayout,
    LibraryPart,
    LibraryProgram,
    ManifestFacts,
    Memory,
    PlainPart,
    PlainProgram,
    ProgramEntry,
    StepTypes,
    StoredWeight,
    TargetPart,
)

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 4 << 30
WRITE_BYTES = 16 << 20  # a multiple of a huge page
COUNT_AT_A_TIME = 1 << 18  # elements of a piece, so few that its temporary arrays stay in the processor's cache
# The exponent bits of a dtype, which are all ones in an infinity and in a NaN.
EXPONENTS = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
Progress = Callable[[int, int], None]  # (bytes done, bytes in all)


@dataclass
class PlacedTensor:
    """A stored tensor and its place; `offset` counts from the first data byte of its file."""

    name: str
    weight: Weight
    offset: int

    @property
    def shape(self) -> tuple[int, ...]:
        return weight_lib.physical_shape(self.weight)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.weight.dtype.itemsize


@dataclass
class WeightFile:
    """A safetensors file: tensors in the order in which the step reads them, each padded to 64 bytes."""

    name: str = ""
    tensors: list[PlacedTensor] = field(default_factory=list)
    data_bytes: int = 0

    def header(self) -> bytes:
        """Return the bytes of the file before its first data byte.

        The safetensors format allows no holes, so each padding is a tensor of its own.
        """
        entries: dict[str, Any] = {"__metadata__": {"format": "inferc"}}
        for tensor in self.tensors:
            end = tensor.offset + tensor.num_bytes
            dtype = STORED_DTYPES[dtype_name(tensor.weight.dtype)][0]
            entries[tensor.name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [tensor.offset, end]}
            if end != align(end):
                filler = {"dtype": "U8", "shape": [align(end) - end], "data_offsets": [end, align(end)]}
                entries[f"filler.{tensor.name}"] = filler
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=True)
        text += " " * (align(8 + len(text)) - 8 - len(text))
        return len(text).to_bytes(8, "little") + text.encode()


def plan_weight_files(
    weights: Mapping[str, Weight], max_bytes: int = MAX_FILE_BYTES
) -> tuple[list[WeightFile], dict[str, str]]:
    """Place every weight once, and return the files and, for each name, the name under which its tensor is stored."""
    files = [WeightFile()]
    stored: dict[Weight, str] = {}
    names = {}
    for name, weight in weights.items():
        names[name] = stored.setdefault(weight, name)
        if names[name] != name:
            continue
        tensor = PlacedTensor(name, weight, files[-1].data_bytes)
        if files[-1].tensors and align(tensor.offset + tensor.num_bytes) > max_bytes:
            files.append(WeightFile())
            tensor.offset = 0
        files[-1].tensors.append(tensor)
        files[-1].data_bytes = align(tensor.offset + tensor.num_bytes)
    for index, file in enumerate(files):
        file.name = f"weights-{index + 1:05d}-of-{len(files):05d}.safetensors"
    return files, names


class AlignedWriter:
    """A writer that joins its input into aligned writes of `WRITE_BYTES`; only the last write may be shorter.

    Linux keeps data written this way in huge pages, and a process that maps the file soon gets these: decode then reads
    the weights a tenth faster.
    """

    def __init__(self, raw: io.RawIOBase | io.FileIO) -> None:
        self._raw, self._held, self._room = raw, bytearray(WRITE_BYTES), WRITE_BYTES

    def write(self, data: memoryview) -> None:
        while len(data):
            piece = data[: self._room]
            start = WRITE_BYTES - self._room
            self._held[start : start + len(piece)] = piece
            self._room -= len(piece)
            data = data[len(piece) :]
            if not self._room:
                self._flush()

    def _flush(self) -> None:
        left = memoryview(self._held)[: WRITE_BYTES - self._room]
        while len(left):
            left = left[self._raw.write(left) or 0 :]
        self._room = WRITE_BYTES

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._flush()


@dataclass
class ArtifactWriter:
    """A writer of the parts of one artifact into `folder`, which also collects what the manifest lists.

    allow_broken: also write weights with a NaN or an infinity, instead of raising.
    """

    folder: OutputFolder
    allow_broken: bool = False
    files: dict[str, FileEntry] = field(default_factory=dict)
    weights: list[StoredWeight] = field(default_factory=list)

    def add(self, name: str, data: bytes) -> None:
        """Write a file whose digest readers check as a whole before use."""
        self._write(name, data)
        self.files[name] = FileEntry(len(data), sha256=hashlib.sha256(data).hexdigest())

    def add_mapped(self, name: str, data: memoryview) -> None:
        """Write a large file that readers map and check one chunk at a time, as they do the weights."""
        digests = ChunkDigests()
        digests.update(data)
        self._write(name, data)
        self.files[name] = FileEntry(len(data), xxh3_128=digests.finish())

    def drop_weights(self) -> None:
        """Delete the files of the weights, whose contents another file of the artifact now holds."""
        for name in {weight.file for weight in self.weights}:
            (self.folder.path / name).unlink()
            del self.files[name]
        self.weights = []

    def _write(self, name: str, data: bytes | memoryview) -> None:
        try:
            self.folder.write(name, data)
        except OSError as error:
            raise ConfigError(f"cannot write {self.folder.out / name}: {error.strerror}") from None

    def add_weights(self, weights: Mapping[str, Weight], reader: TensorReader, progress: Progress) -> None:
        """Materialise `weights` into files, one chunk of rows at a time.

        Raises ArtifactError for a weight with a NaN or an infinity, unless `allow_broken`; ConfigError for a full disk.
        """
        files, names = plan_weight_files(weights)
        total = sum(file.data_bytes for file in files)
        free = shutil.disk_usage(self.folder.path).free
        if free < total:
            raise ConfigError(
                f"cannot write {self.folder.out}: the weights take {total} bytes, the disk has {free} free"
            )
        places = {}
        done = 0
        for file in files:
            header = file.header()
            for tensor in file.tensors:
                places[tensor.name] = (file.name, len(header) + tensor.offset, tensor.num_bytes)
            try:
                self._write_file(
                    file,
                    header,
                    reader,
                    lambda count, base=done: progress(base + count, total),  # type: ignore[misc]
                )
            except OSError as error:
                raise ConfigError(f"cannot write {self.folder.out / file.name}: {error.strerror}") from None
            done += file.data_bytes
        self.weights = [_stored(name, weight, *places[names[name]]) for name, weight in weights.items()]
        lines = [f"{name}: {dtype_name(w.dtype)}{list(w.shape)} = {w}\n" for name, w in weights.items()]
        self.add("graph/weights.txt", "".join(lines).encode())

    def _write_file(
        self, file: WeightFile, header: bytes, reader: TensorReader, progress: Callable[[int], None]
    ) -> None:
        digests = ChunkDigests()
        with (self.folder.path / file.name).open("wb", buffering=0) as raw, AlignedWriter(raw) as out:

            def put(data: memoryview) -> None:
                digests.update(data)
                out.write(data)

            put(memoryview(header))
            for tensor in file.tensors:
                end = len(header) + tensor.offset + tensor.num_bytes
                broken = 0
                for chunk in weight_lib.materialize(tensor.weight, reader):
                    broken += count_broken(chunk)
                    put(chunk.reshape(-1).view(torch.uint8).numpy().data)
                    progress(digests.num_bytes - len(header))
                assert digests.num_bytes == end, f"{tensor.name}: wrote up to byte {digests.num_bytes}, planned {end}"
                put(memoryview(bytes(align(end) - end)))
                if broken:
                    self._report_broken(tensor, broken, reader)
        self.files[file.name] = FileEntry(digests.num_bytes, xxh3_128=digests.finish())

    def _report_broken(self, tensor: PlacedTensor, count: int, reader: TensorReader) -> None:
        """Raise ArtifactError, or with `allow_broken` warn, for a weight with numbers that are NaN or infinite.

        The message names the checkpoint's tensor if that is broken, since the stored tensor may be joined from several.
        """
        name, become = tensor.name, f" as {dtype_name(tensor.weight.dtype)}"
        for leaf in tensor.weight.sources():
            found = sum(count_broken(chunk) for chunk in weight_lib.materialize(leaf, reader))
            if found:
                name, count, become = leaf.name or name, found, ""
                break
        message = f"tensor {name} has {count} numbers that are NaN or infinite{become}"
        if not self.allow_broken:
            raise ArtifactError(
                f"{message}; expected finite weights: the checkpoint was saved so, or changed since; take another one"
                " (--allow-drift compiles it all the same)"
            )
        log.warning("%s", message)

    def add_program(
        self, program: Program, memory_plan: MemoryPlan, part: TargetPart, file: str = PROGRAM, prefix: str = ""
    ) -> None:
        """Write the file of a program: the step's inputs and outputs, the weights, the lowered graph, the memory plan.

        part: the fields that the target's runner needs in addition; prefix: what `add_weights` had in front of the
        program's names of weights.
        """
        stored = {weight.name: weight for weight in self.weights}
        names = program.weights if stored else ()  # without stored weights, a plan holds them
        weights = [msgspec.structs.replace(stored[prefix + name], name=name) for name in names]
        self.add(file, json_bytes(stored_program(program, memory_plan, part, weights)))

    def write_manifest(self, facts: ManifestFacts) -> None:
        """Write engine.json as the last file: it lists every other file by name, and has its own digest."""
        manifest = msgspec.to_builtins(facts)
        model = manifest["model"]
        if len(facts.programs) > 1 and "quantization" in model:
            model["quantization"] = model.pop("quantization")  # it is a sum over the ranks
        self._write(MANIFEST, seal_manifest({**manifest, "files": dict(sorted(self.files.items()))}))


PROGRAMS = {PlainPart: PlainProgram, LibraryPart: LibraryProgram, CubinPart: CubinProgram}


def stored_program(
    program: Program, memory_plan: MemoryPlan, part: TargetPart, weights: Sequence[StoredWeight]
) -> manifest_types.Program:
    """Return the contents of a program's file."""
    hidden, _ = outputs(program)
    step = StepTypes(
        inputs=[Input(node.name, **_type_of(node.meta["val"])) for node in program.inputs()],
        outputs=_output_names(program),
        hidden=Hidden(**_type_of(hidden.meta["val"]), value=hidden.name),
    )
    graph = program_lib.to_json(dataclasses.replace(program, weights=_stored_weights(program)))
    made: manifest_types.Program = PROGRAMS[type(part)](
        **{
            **msgspec.structs.asdict(part),
            "step": step,
            "weights": list(weights),
            "memory_plan": memory_plan,
            "program": msgspec.convert(graph, Graph),
        }
    )
    return made


def count_broken(chunk: torch.Tensor) -> int:
    """Return how many elements are NaN or infinite; 0 for quantized elements, whose scales would be broken instead."""
    if not chunk.is_floating_point() or chunk.element_size() == 1:
        return 0
    exponent = EXPONENTS.get(chunk.dtype)
    flat: NDArray[Any] = (chunk if exponent is None else chunk.view(torch.uint16)).reshape(-1).numpy()
    count = 0
    for start in range(0, flat.size, COUNT_AT_A_TIME):
        piece = flat[start : start + COUNT_AT_A_TIME]
        if exponent is None:
            count += piece.size - int(np.count_nonzero(np.isfinite(piece)))
        else:
            count += int(np.count_nonzero((piece & exponent) == exponent))
    return count


def program_entry(
    program: Program,
    *,
    file: str,
    ranks: Mapping[str, int],
    libraries: Mapping[str, str],
    cubins: Mapping[str, str],
    arena: MemoryFormula,
    kv_layout: KvLayout,
) -> ProgramEntry:
    """Return the entry of one program in engine.json.

    ranks: tp_rank, pp_stage, ep_rank; libraries: instruction set to file, best first; cubins: chip, or "ptx", to
    folder.
    """
    groups = program_lib.to_json(program)["kv_groups"]
    layout = msgspec.to_builtins(kv_layout)
    digest = hashlib.sha256(json.dumps([layout, groups, program.block_size], sort_keys=True).encode()).hexdigest()
    return ProgramEntry(
        name=program.name,
        file=file,
        **ranks,
        inputs=[node.name for node in program.inputs()],
        outputs=[*_output_names(program)],
        kv_groups=[
            KvGroup(**group, bytes_per_token=of.bytes_per_token)
            for group, of in zip(groups, program.kv_groups, strict=True)
        ],
        num_weights=len(program.weights),
        libraries=dict(libraries),
        cubins=dict(cubins),
        memory=Memory(arena, sum(group.bytes_per_token for group in program.kv_groups)),
        kv_layout=KvIdentity(**msgspec.structs.asdict(kv_layout), hash=digest),
    )


def _output_names(program: Program) -> list[Literal["hidden", "logits"]]:
    """Return the names of the outputs: hidden, and logits if the program has the LM head."""
    return ["hidden", "logits"][: len(program.output().args[0])]  # type: ignore[arg-type, return-value]


def _stored(name: str, weight: Weight, file: str, offset: int, num_bytes: int) -> StoredWeight:
    layout = weight.layout if weight.op == "pack" else ""
    physical = weight_lib.physical_shape(weight)
    return StoredWeight(name, file, offset, num_bytes, dtype_name(weight.dtype), weight.shape, physical, layout)


def _stored_weights(program: Program) -> dict[str, Weight]:
    """Return the weights as the artifact's reader finds them: tensors of its own files, no longer expressions."""
    stored = {}
    for name, weight in program.weights.items():
        leaf = weight_lib.source(name, weight.shape, weight.dtype)
        stored[name] = weight_lib.pack(leaf, weight.layout) if weight.op == "pack" else leaf
    return stored


def _type_of(value: torch.Tensor) -> dict[str, Any]:
    return {"dtype": dtype_name(value.dtype), "shape": [str(size) for size in value.shape]}
