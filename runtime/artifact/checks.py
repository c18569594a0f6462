"""The consistency checks between the fields of an artifact's files, after their types were checked (manifest_types.py).

A library or a GPU reads memory by tables made from these fields. A table that is too short, or that names something
missing, is found here, and not while a step runs. Every function returns the fault, beginning with the field, or None.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from pathlib import PurePosixPath

from inferc.errors import ConfigError
from inferc.kv_groups import num_parts, row_size
from inferc.manifest import ALIGNMENT, CERTIFICATE, CHUNK_BYTES, PROGRAM, PTX, RECORDS, STORED_DTYPES
from inferc.manifest_types import Graph, KvGroup, Launches, LaunchRecord, Manifest, Program, ProgramEntry, StoredWeight
from inferc.targets import find_spec

NUM_KEEP = 3  # launches that keep rows in the artifact of a head


def manifest_fault(manifest: Manifest) -> str | None:
    """Find a contradiction within engine.json."""
    for name, entry in manifest.files.items():
        parts = PurePosixPath(name).parts
        if PurePosixPath(name).is_absolute() or ".." in parts:
            return f"files names {name!r}, which is outside of the artifact"
        if (entry.sha256 is None) == (entry.xxh3_128 is None):
            return f"files.{name}: expected either sha256 or xxh3_128"
        if entry.xxh3_128 is not None and len(entry.xxh3_128) != -(-entry.bytes // CHUNK_BYTES):
            return f"files.{name}: {len(entry.xxh3_128)} digests for {entry.bytes} bytes in chunks of {CHUNK_BYTES}"
        if parts[:1] in (("kernels",), ("tokenizer",), (PROGRAM,), (CERTIFICATE,)) and entry.sha256 is None:
            return f"files.{name}: expected a sha256"
    for index, target in enumerate(manifest.targets):
        try:
            find_spec(target)
        except ConfigError as error:
            return f"targets[{index}]: {error}"
    if manifest.tensorrt is not None and manifest.tensorrt.plans is None:  # the plan is the whole step
        for index, profile in enumerate(manifest.tensorrt.profiles):
            if profile.max_num_seqs is None:
                return f"tensorrt.profiles[{index}].max_num_seqs: it is missing"
    for index, program in enumerate(manifest.programs):
        if (fault := _entry_fault(program, manifest)) is not None:
            return f"programs[{index}].{fault}"
    return None


def _entry_fault(entry: ProgramEntry, manifest: Manifest) -> str | None:
    def is_read(name: str) -> bool:
        return name in manifest.files and manifest.files[name].sha256 is not None

    if not is_read(entry.file):
        return f"file: {entry.file!r} is not among the files that have a sha256"
    for isa, name in entry.libraries.items():
        if not is_read(name) or not name.startswith("kernels/"):
            return f"libraries.{isa}: {name!r} is not among the files in kernels/"
    for chip, folder in entry.cubins.items():
        if not is_read(f"{folder}/{RECORDS}") or not folder.startswith("kernels/"):
            return f"cubins.{chip}: there is no {RECORDS} in {folder!r}"
    for group, of in enumerate(entry.kv_groups):
        if (expected := _bytes_per_token(of)) != of.bytes_per_token:
            return f"kv_groups[{group}].bytes_per_token: found {of.bytes_per_token}, and its layers take {expected}"
    if (total := sum(of.bytes_per_token for of in entry.kv_groups)) != entry.memory.kv_bytes_per_token:
        return f"memory.kv_bytes_per_token: found {entry.memory.kv_bytes_per_token}, and kv_groups take {total}"
    return None


def _bytes_per_token(of: KvGroup) -> int:
    elements = num_parts(of.kind) * of.num_kv_heads * row_size(of.head_dim, of.dtype)
    return len(of.layers) * elements * STORED_DTYPES[of.dtype][1]


def program_fault(program: Program, entry: ProgramEntry, sizes: Mapping[str, int]) -> str | None:
    """Find a contradiction within a program.json, or with its entry in engine.json.

    sizes: the bytes of each file that is mapped.
    """
    names = [each.name for each in program.step.inputs]
    if names != entry.inputs:
        return f"step.inputs: found {', '.join(names)}, and engine.json has {', '.join(entry.inputs)}"
    if not str(program.step.hidden.shape[-1]).isdigit():
        return f"step.hidden.shape: the last is {program.step.hidden.shape[-1]!r}, expected a number"
    if program.step.outputs != entry.outputs:
        return f"step.outputs: found {program.step.outputs}, and engine.json has {entry.outputs}"
    if (entry.libraries or program.weights) and len(program.weights) != entry.num_weights:
        return f"weights: found {len(program.weights)}, and engine.json has {entry.num_weights}"
    for index, row in enumerate(program.weights):
        if (fault := _weight_fault(row, sizes)) is not None:
            return f"weights[{index}]{fault}"
    if (fault := _launches_fault(program.launches, program, entry)) is not None:
        return fault
    return _graph_fault(program.program)


def records_fault(records: Sequence[LaunchRecord], folder: str, files: Container[str]) -> str | None:
    """Find a launch record in a folder of kernels whose code is missing."""
    suffix = PTX if PurePosixPath(folder).name == PTX else "cubin"
    for index, record in enumerate(records):
        if f"{folder}/{record.name}.{suffix}" not in files:
            return f"[{index}].name: there is no {folder}/{record.name}.{suffix}"
    return None


def _weight_fault(row: StoredWeight, sizes: Mapping[str, int]) -> str | None:
    if row.file not in sizes or row.offset % ALIGNMENT or row.offset + row.num_bytes > sizes[row.file]:
        return f": it places weight {row.name} outside of {row.file}"
    if row.dtype not in STORED_DTYPES:
        return f".dtype: found {row.dtype!r}, expected one of {', '.join(STORED_DTYPES)}"
    if (num_bytes := math.prod(row.physical_shape) * STORED_DTYPES[row.dtype][1]) != row.num_bytes:
        return f".num_bytes: found {row.num_bytes}, and its shape takes {num_bytes}"
    return None


def _launches_fault(launches: Launches, program: Program, entry: ProgramEntry) -> str | None:
    """Find a launch that names something that does not exist according to engine.json and program.json."""
    weights = {row.name for row in program.weights}
    if len(launches.rows) not in (0, NUM_KEEP):
        return f"launches.rows: found {len(launches.rows)}, expected {NUM_KEEP} for a head and none for a model"
    for part in ("begin", "step", "head", "sample", "score", "rows"):
        for index, launch in enumerate(getattr(launches, part)):
            at = f"launches.{part}[{index}]"
            if bool(launch.choices) == (launch.engine is not None):
                return f"{at}: expected either choices or engine"
            for name, where in launch.arguments.items():
                if where.weight is not None and where.weight not in weights:
                    return f"{at}.arguments.{name}: there is no weight {where.weight!r}"
                if where.cache is not None and (where.cache >= len(entry.kv_groups) or where.offset is None):
                    return f"{at}.arguments.{name}: there is no KV group {where.cache}, or no offset in it"
                if where.scratch is not None and where.scratch not in program.scratch:
                    return f"{at}.arguments.{name}: there is no scratch {where.scratch!r}"
                if where.value is not None and None in (where.offset, where.column):
                    return f"{at}.arguments.{name}: expected offset and column beside value"
    return None


def _graph_fault(graph: Graph) -> str | None:
    for index, node in enumerate(graph.nodes):
        if node.op != "output" and node.target is None:
            return f"program.nodes[{index}].target: it is missing"
    return None
