"""The arranging of an adapter's matrices for a compiled step: as its products are packed, padded and reordered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from inferc.errors import ArtifactError, UnsupportedError
from inferc.ir.adapter_sites import Adapters, AdapterSite, IndexRun
from inferc.manifest_types import Program
from inferc.runtime.adapters.peft import MERGE, LowRank, PeftAdapter
from inferc.runtime.artifact.files import AGAIN
from inferc.runtime.artifact.load import Artifact
from inferc.runtime.artifact.numpy_dtypes import NUMPY_DTYPES, rounded
from inferc.runtime.step.plan import F32, I32, I64

ALIGNMENT = 64  # bytes at which each matrix begins


@dataclass(frozen=True)
class ArrangedAdapter:
    """The matrices of an adapter in one buffer, in the dtype of the step (bfloat16 as its bits).

    down, up [sites]: where in `data` A [rank, inputs] (of an embedding [vocab_size, rank]) and the transposed B
    [rank, outputs] of each site begin, in elements; ranks [sites]: 0 where the adapter has nothing.
    """

    data: NDArray[Any]
    down: I64
    up: I64
    ranks: I32


def room_for_adapters(artifact: Artifact) -> Adapters | None:
    """Return the room that an artifact's steps have for adapters, or None.

    Raises ArtifactError if it is not of the format.
    """
    try:
        return room_of(artifact.program)
    except msgspec.ValidationError as error:
        raise ArtifactError(
            f"{artifact.path / artifact.entry.file} is not of the format: adapters: {error}; {AGAIN}"
        ) from None


def room_of(program: Program) -> Adapters | None:
    """Return the room that the steps of a program have for adapters, or None."""
    found = program.program.info.get("adapters")
    return None if found is None else msgspec.convert(found, Adapters)


def arrange(adapter: PeftAdapter, room: Adapters, dtype: str) -> ArrangedAdapter:
    """Arrange an adapter for a step with `room`, whose dtype is "bfloat16" or "float32".

    Raises UnsupportedError if the step has no place for a module, another shape of it, or not room for its rank.
    """
    of_sites: list[LowRank | None] = [None] * len(room.sites)
    for name, module in adapter.modules.items():
        found = [number for number, site in enumerate(room.sites) if _is_named(site.module, name)]
        if not found:
            raise UnsupportedError(
                f"{adapter.path}: {name}: the artifact has no place for an adapter there; it has them at"
                f" {_some(room.sites)}; {MERGE}"
            )
        _check(adapter, name, module, room.sites[found[0]], room.rank)
        for number in found:
            if of_sites[number] is not None:
                raise UnsupportedError(
                    f"{adapter.path}: {name}: another module of this file is {room.sites[number].module}, too; the"
                    f" artifact has one: {MERGE}"
                )
            of_sites[number] = module
    for name, shape in adapter.copied.items():
        for site in (each for each in room.sites if _is_named(each.module, name)):
            if shape != tuple(site.stored):
                raise UnsupportedError(
                    f"{adapter.path}: {name}: its file has this matrix itself as {list(shape)}, and the artifact's is"
                    f" {site.stored}: the vocabulary was changed; {MERGE}"
                )
    itemsize = NUMPY_DTYPES[dtype].itemsize
    step = ALIGNMENT // itemsize
    down, up = np.zeros(len(of_sites), np.int64), np.zeros(len(of_sites), np.int64)
    ranks = np.array([0 if each is None else each.rank for each in of_sites], np.int32)
    size = 0
    for number, (site, rank) in enumerate(zip(room.sites, ranks.tolist(), strict=True)):
        taken, given = sizes_of(site)
        down[number], size = size, size + -(-rank * taken // step) * step
        up[number], size = size, size + -(-rank * given // step) * step
    data = _aligned(size, NUMPY_DTYPES[dtype])
    for number, (site, each) in enumerate(zip(room.sites, of_sites, strict=True)):
        if each is None:
            continue
        a, b = _matrices(site, each)
        for at, values in ((down[number], a), (up[number], b)):
            flat = np.ascontiguousarray(values, np.float32).reshape(-1)
            data[at : at + len(flat)] = rounded(flat) if dtype == "bfloat16" else flat
    return ArrangedAdapter(data, down, up, ranks)


def sizes_of(site: AdapterSite) -> tuple[int, int]:
    """Return the elements of a site's A and B for each rank: what it reads, and what it adds to."""
    both = site.num_inputs, site.num_outputs
    return both if site.kind == "linear" else both[::-1]


def _aligned(size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    raw = np.zeros(size * dtype.itemsize + ALIGNMENT, np.uint8)
    first = -raw.ctypes.data % ALIGNMENT
    return raw[first : first + size * dtype.itemsize].view(dtype)


def _is_named(site: str, module: str) -> bool:
    """Tell whether an adapter's module is that of a site: models of one family are wrapped differently."""
    return site == module or site.endswith("." + module) or module.endswith("." + site)


def _some(sites: Sequence[AdapterSite]) -> str:
    names = list(dict.fromkeys(site.module.rpartition(".")[2] for site in sites))
    return ", ".join(names[:12]) + (", …" if len(names) > 12 else "")


def _check(adapter: PeftAdapter, name: str, module: LowRank, site: AdapterSite, rank: int) -> None:
    outputs, inputs = site.stored
    if module.is_embedding != (site.kind == "embedding"):
        raise UnsupportedError(f"{adapter.path}: {name}: it is made for another kind of layer than the artifact's")
    shapes = (outputs, inputs) if module.is_embedding else (inputs, outputs)
    found = module.a.shape[1], module.b.shape[0]
    if found != shapes:
        raise UnsupportedError(
            f"{adapter.path}: {name}: from {found[0]} to {found[1]} features, and the artifact has {shapes[0]} to"
            f" {shapes[1]} there: the adapter was made for another model"
        )
    if module.rank > rank:
        raise UnsupportedError(
            f"{adapter.path}: {name}: rank {module.rank}, and the artifact has room for rank {rank}; compile the model"
            f" again with --adapter-rank {module.rank}"
        )


def _matrices(site: AdapterSite, module: LowRank) -> tuple[F32, F32]:
    """Return A and the transposed B of a module as a site has them."""
    if site.kind == "embedding":
        return module.a.T, _taken(module.b, site.inputs, 0).T
    return _taken(module.a, site.inputs, 1), _taken(module.b, site.outputs, 0).T


def _taken(values: F32, runs: Sequence[IndexRun] | None, axis: int) -> F32:
    """Return the rows or columns that the runs name, and zeros for those that a pass added."""
    if runs is None:
        return values
    indices = np.concatenate([run.first + run.step * np.arange(run.count) for run in runs])
    taken: F32 = np.take(values, np.maximum(indices, 0), axis)
    (taken if axis == 0 else taken.T)[indices < 0] = 0
    return taken
