"""Find the best tile sizes of a model's products on this machine's GPU, and write them where the compiler finds them.

    python benchmarks/gpu_tune.py [SHAPE …] [--int8] [--minutes 8]       shapes of make_model.py

It tries every product of the shape, for each row bound that has its own kernel, with all tiles that fit on the chip.
Each launch finds its weights in no cache. Tiles that are faster than the compiler's own choice by more than noise are
written to codegen/triton/configs/CHIP.json, which the next compile for that chip reads. All cores compile kernels while
the GPU measures. The best kernel for many rows is then compared with cuBLASLt, if this machine has it, and the number
of rows from which the library is faster is written there too.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gpu import TINY
from gpu_model import random_step
from gpu_timing import elapsed_ms

from inferc.codegen.triton.aot.build import Cubin
from inferc.codegen.triton.aot.builders import Builders, Job
from inferc.codegen.triton.aot.launch import grid_for
from inferc.codegen.triton.aot.source import COUNTS, Source
from inferc.codegen.triton.aot.tuning import FOLDER, TILES, shape_of
from inferc.errors import InfercError, UnsupportedError
from inferc.manifest import CUBLASLT
from inferc.manifest_types import RecordLibrary
from inferc.runtime.runners.cuda import cublaslt
from inferc.runtime.runners.cuda.capacity import MAX_SAMPLE_ROWS
from inferc.runtime.runners.cuda.cublaslt import CublasLt
from inferc.runtime.runners.cuda.driver import Driver

SHAPES = ("llama-3.1-8b", "llama-3.2-1b")
KERNELS = ("linear", "linear_silu_mul", "qkv_rope_kv_write")
WORTH = 0.97  # a candidate is better if it takes less than this share of the time of the compiler's own choice
REPEATS = 20
COLD_BYTES = 256 << 20  # larger than any L2 cache
SIZES: dict[str, tuple[int, ...]] = {"BLOCK_N": (16, 32, 64, 128), "BLOCK_K": (64, 128, 256)}
WARPS, STAGES = (4, 8), (3, 4, 5, 6)
IN_FLIGHT = (8 << 10, 160 << 10)  # range of bytes of weights in flight that is worth trying
TOKENS_OF_PREFILL = 4096
# Numbers of rows at which the library is compared. Some are not powers of two, because the library is configured once
# for all numbers of rows up to a power of two.
MANY_ROWS = (192, 256, 512, 1000, 2048, 3000, TOKENS_OF_PREFILL)
ARGUMENT_BYTES = 64 << 20  # memory for every argument except the weight


def candidates(source: Source) -> Iterator[Source]:
    """Yield the kernel source with other tile sizes, beginning with its own."""
    yield source
    itemsize = 1 if "*i8" in source.signature.values() else 2
    names = [name for name in TILES if name in source.constants]
    for sizes in itertools.product(*(SIZES[name] for name in names)):
        constants = {**source.constants, **dict(zip(names, sizes, strict=True))}
        if source.constants.get("HOW") and constants["BLOCK_N"] != source.constants["BLOCK_N"]:
            continue  # a fused norm needs a whole head in one program
        tile_bytes = int(constants["BLOCK_N"]) * int(constants["BLOCK_K"]) * itemsize
        for warps, stages in itertools.product(WARPS, STAGES):
            made = dataclasses.replace(source, constants=constants, num_warps=warps, num_stages=stages)
            if made != source and IN_FLIGHT[0] <= tile_bytes * (stages - 1) <= IN_FLIGHT[1]:
                yield made


def rows_of(source: Source) -> int:
    """Return the number of rows that a kernel variant is meant for."""
    if source.constants["FEW"]:
        return int(source.constants["BLOCK_M"])
    return MAX_SAMPLE_ROWS if source.constants.get("COUNT") == COUNTS["rows"] else TOKENS_OF_PREFILL


@dataclasses.dataclass
class Bed:
    """The test bed of kernel launches: a driver, and memory that is large enough for any product."""

    driver: Driver
    cold_bytes: int
    argument_bytes: int
    library: CublasLt | None = None

    def __post_init__(self) -> None:
        self.stream = self.driver.new_stream()
        self.cold = self.driver.allocate(self.cold_bytes)
        self.places: dict[str, tuple[int, int]] = {}
        self.counts, self.counts_here = self.driver.allocate(256), self.driver.allocate_host(16)

    def address(self, name: str, num_bytes: int) -> int:
        held, at = self.places.get(name, (0, 0))
        if held < num_bytes:
            if at:
                self.driver.free(at)
            at = self.driver.allocate(num_bytes)
            self.driver.fill(at, 0, num_bytes, self.stream)
            self.places[name] = (num_bytes, at)
        return at

    def microseconds(self, source: Source, cubin: Cubin, rows: int) -> float:
        """Return the median time of a kernel launch over `rows` rows, in microseconds."""
        values = self.values(source, rows)
        self.driver.wait(self.stream)
        self.counts_here.view(np.int32)[:] = (rows, rows, rows, 0)
        self.driver.copy_in(self.counts, self.counts_here.ctypes.data, 16, self.stream)
        kernel = self.driver.load(cubin.data, cubin.record)
        bound = kernel.bind({**values, "counts_ptr": self.counts})
        grid = grid_for(cubin.record, num_tokens=rows, num_rows=rows, num_seqs=rows)
        spent = self.median(lambda: bound.launch(self.stream, grid))
        kernel.unload()
        return spent

    def library_microseconds(self, source: Source, rows: int) -> float | None:
        """Return the median time of the library for the same product, or None if it cannot compute it."""
        assert self.library is not None and source.product is not None
        choice = RecordLibrary(CUBLASLT, rows, source.product)
        bound = self.library.bind(choice, self.values(source, rows))
        bound.prepare(self.stream, rows)
        return self.median(lambda: bound.launch(self.stream, rows)) if bound.takes(rows) else None

    def values(self, source: Source, rows: int) -> dict[str, int]:
        """Return the address of memory for each argument."""
        k, n = int(source.constants["K"]), int(source.constants.get("N", 1 << 14))
        widest = max(k, n, *(int(value) for name, value in source.constants.items() if name.endswith("STRIDE")))
        values = {name: self.address(name, max(4 * rows * widest, self.argument_bytes)) for name in source.signature}
        return {**values, "weight_ptr": self.address("weight_ptr", max(8 * k * n, self.argument_bytes))}

    def median(self, launch: Callable[[], None]) -> float:
        """Return the median microseconds of a launch with cold caches."""
        times = []
        for _ in range(REPEATS):
            self.driver.fill(self.cold, 0, self.cold_bytes, self.stream)
            times.append(1e3 * elapsed_ms(self.driver, self.stream, launch))
        return statistics.median(times)

    def close(self) -> None:
        if self.library is not None:
            self.driver.wait(self.stream)
            self.library.close()
            self.driver.free(self.library.workspace)
        for address in (self.cold, self.counts, *(at for _, at in self.places.values())):
            self.driver.free(address)
        self.driver.free_host(self.counts_here)


def tune(
    bed: Bed, builders: Builders, kernel: str, source: Source, until: float, *, beside_library: bool = False
) -> dict[str, Any] | None:
    """Return the entry of what beats the compiler's own choice (the best tile, the library, or both), else None."""
    own, best, found, timed = 0.0, 0.0, source, None
    tried = list(candidates(source))
    jobs = [Job(each, kernel, each.function.__name__, bed.driver.arch, fit=False) for each in tried]
    for each, cubin in zip(tried, builders.tried(jobs), strict=True):
        if time.monotonic() > until:
            break
        if isinstance(cubin, Exception):
            continue  # the kernel spills registers or does not fit on the chip
        spent = bed.microseconds(each, cubin, rows_of(each))
        if not own:
            own, best, timed = spent, spent, cubin
        elif spent < min(best, own * WORTH):
            best, found, timed = spent, each, cubin
    entry: dict[str, Any] = {"kernel": kernel, "shape": shape_of(source)}
    if found is not source:
        entry["constants"] = {name: found.constants[name] for name in TILES}
        entry |= {"num_warps": found.num_warps, "num_stages": found.num_stages}
        entry |= {"us": round(best, 2), "own_us": round(own, 2)}
    if beside_library and timed is not None and bed.library is not None and source.product is not None:
        entry |= compared(bed, found, timed)
    return entry if {"constants", "library"} & entry.keys() else None


def compared(bed: Bed, source: Source, cubin: Cubin) -> dict[str, Any]:
    """Return the "library" part of an entry: from how many rows on the library is faster than the kernel.

    It is empty if the library is not faster at the largest number of rows.
    """
    measured: dict[str, list[float]] = {}
    from_rows = None
    for rows in sorted((each for each in MANY_ROWS if each <= rows_of(source)), reverse=True):
        ours, theirs = bed.microseconds(source, cubin, rows), bed.library_microseconds(source, rows)
        if theirs is None or theirs > ours * WORTH:
            break
        from_rows, measured[str(rows)] = rows, [round(ours, 2), round(theirs, 2)]
    return {} if from_rows is None else {"library": {"name": CUBLASLT, "from_rows": from_rows, "us": measured}}


def merge(kernel: str, source: Source, entry: dict[str, Any] | None, path: Path) -> None:
    """Store an entry in the file, in place of the entry for the same kernel and shape."""
    stored = json.loads(path.read_text()) if path.exists() else []
    kept = [each for each in stored if (each["kernel"], each["shape"]) != (kernel, shape_of(source))]
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps([*kept, *([entry] if entry else [])], indent=1) + "\n")
    partial.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", default=list(SHAPES))
    parser.add_argument("--int8", action="store_true", help="tune the products of --quantize int8")
    parser.add_argument("--minutes", type=float, default=8.0, help="time after which no further tile is tried")
    parser.add_argument("--out", type=Path, default=FOLDER, help="the folder of CHIP.json")
    parser.add_argument("--tiny", action="store_true", help="use a tiny model, to try out the program itself")
    arguments = parser.parse_args()
    try:
        driver = Driver()
    except InfercError as error:
        sys.exit(f"gpu_tune.py: {error}")
    until = time.monotonic() + 60 * arguments.minutes
    bed = Bed(driver, 1 << 16 if arguments.tiny else COLD_BYTES, 1 << 21 if arguments.tiny else ARGUMENT_BYTES)
    try:
        bed.library = CublasLt(cublaslt.open_library(driver.version[0]), driver.allocate)
    except UnsupportedError as error:
        print(f"gpu_tune.py: not beside cuBLASLt: {error}", file=sys.stderr)
    done: set[str] = set()
    # One core drives the measurements on the GPU while the others compile.
    with Builders(1 if arguments.tiny else max(1, (os.cpu_count() or 2) - 1)) as builders:
        for shape in arguments.shapes:
            step = random_step(TINY if arguments.tiny else shape, driver.arch, "int8" if arguments.int8 else None)
            for name, source in step.sources.items():
                kernel = name.rpartition("-")[0]
                key = json.dumps([kernel, shape_of(source)])
                if kernel in KERNELS and key not in done:
                    done.add(key)
                    entry = tune(bed, builders, kernel, source, until, beside_library=name in step.for_many_rows)
                    print(json.dumps({name: entry}), flush=True)
                    if entry or time.monotonic() < until:  # otherwise not all candidates were tried
                        merge(kernel, source, entry, arguments.out / f"{driver.arch}.json")
    bed.close()


if __name__ == "__main__":
    main()
