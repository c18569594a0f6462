"""Find the tiles of a model's products on the GPU that is here, and write them where the compiler looks for them.

    python benchmarks/gpu_tune.py [SHAPE …] [--int8] [--minutes 8]       shapes of make_model.py

Every product of the shape, for each number of rows that has a kernel of its own, with the tiles that the chip has room for; each launch finds
its weights in no cache. What is faster than the compiler's own choice by more than noise goes into codegen/triton/configs/CHIP.json, which the
next compile for that chip reads. Kernels are compiled by all cores while the GPU measures.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu import TINY, elapsed_ms
from gpu_model import random_step

from inferc.codegen.triton.build import Cubin, build
from inferc.codegen.triton.source import Source
from inferc.codegen.triton.tuning import FOLDER, TILES, shape_of
from inferc.errors import InfercError
from inferc.runtime.cuda.driver import Driver

SHAPES = ("llama-3.1-8b", "llama-3.2-1b")
KERNELS = ("linear", "linear_silu_mul", "qkv_rope_kv_write")
WORTH = 0.97  # of the time of the compiler's own choice
REPEATS = 20
COLD_BYTES = 256 << 20  # more than any L2
SIZES: dict[str, tuple[int, ...]] = {"BLOCK_N": (16, 32, 64, 128), "BLOCK_K": (64, 128, 256)}
WARPS, STAGES = (4, 8), (3, 4, 5, 6)
IN_FLIGHT = (8 << 10, 160 << 10)  # bytes of weights that are worth trying
TOKENS_OF_PREFILL = 4096
ARGUMENT_BYTES = 64 << 20  # of every argument but the weight


def candidates(source: Source) -> Iterator[Source]:
    """The source with other tiles, its own first."""
    yield source
    itemsize = 1 if "*i8" in source.signature.values() else 2
    names = [name for name in TILES if name in source.constants]
    for sizes in itertools.product(*(SIZES[name] for name in names)):
        constants = {**source.constants, **dict(zip(names, sizes, strict=True))}
        if source.constants.get("HOW") and constants["BLOCK_N"] != source.constants["BLOCK_N"]:
            continue  # a norm needs its head in one program
        tile_bytes = int(constants["BLOCK_N"]) * int(constants["BLOCK_K"]) * itemsize
        for warps, stages in itertools.product(WARPS, STAGES):
            made = dataclasses.replace(source, constants=constants, num_warps=warps, num_stages=stages)
            if made != source and IN_FLIGHT[0] <= tile_bytes * (stages - 1) <= IN_FLIGHT[1]:
                yield made


def rows_of(source: Source) -> int:
    """What the variant is for."""
    return int(source.constants["BLOCK_M"]) if source.constants["FEW"] else TOKENS_OF_PREFILL


@dataclasses.dataclass
class Bed:
    """Memory that any product can be launched over."""

    driver: Driver
    cold_bytes: int
    argument_bytes: int

    def __post_init__(self) -> None:
        self.stream = self.driver.new_stream()
        self.cold = self.driver.allocate(self.cold_bytes)
        self.places: dict[str, tuple[int, int]] = {}
        self.counts = self.driver.allocate(256)

    def address(self, name: str, num_bytes: int) -> int:
        held, at = self.places.get(name, (0, 0))
        if held < num_bytes:
            if at:
                self.driver.free(at)
            at = self.driver.allocate(num_bytes)
            self.driver.fill(at, 0, num_bytes, self.stream)
            self.places[name] = (num_bytes, at)
        return at

    def microseconds(self, source: Source, cubin: Cubin) -> float:
        """Median time of a launch over as many rows as the variant is for."""
        weight = 4 * int(source.constants["K"]) * int(source.constants.get("N", 1 << 14))
        values = {name: self.address(name, self.argument_bytes) for name in source.signature}
        values["weight_ptr"] = self.address("weight_ptr", max(weight, self.argument_bytes))
        rows = rows_of(source)
        counts = (ctypes.c_int32 * 4)(rows, rows, rows, 0)
        self.driver.copy_in(self.counts, ctypes.addressof(counts), 16, self.stream)
        kernel = self.driver.load(cubin.data, cubin.record)
        bound = kernel.bind({**values, "counts_ptr": self.counts})
        grid = cubin.record.grid_for(num_tokens=rows, num_rows=rows, num_seqs=rows)
        times = []
        for _ in range(REPEATS):
            self.driver.fill(self.cold, 0, self.cold_bytes, self.stream)
            times.append(1e3 * elapsed_ms(self.driver, self.stream, lambda: bound.launch(self.stream, grid)))
        kernel.unload()
        return statistics.median(times)

    def close(self) -> None:
        for address in (self.cold, self.counts, *(at for _, at in self.places.values())):
            self.driver.free(address)


def tune(bed: Bed, kernel: str, source: Source, until: float) -> dict[str, Any] | None:
    """The entry of the best tile, if it is worth one."""
    own, best, found = 0.0, 0.0, None
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 1)) as pool:
        built = pool.map(lambda each: (each, _built(each, kernel, bed.driver.arch)), candidates(source))
        for each, cubin in built:
            if cubin is None or time.monotonic() > until:
                continue
            spent = bed.microseconds(each, cubin)
            if not own:
                own = best = spent
            elif spent < min(best, own * WORTH):
                best, found = spent, each
    if found is None:
        return None
    return {
        "kernel": kernel,
        "shape": shape_of(source),
        "constants": {name: found.constants[name] for name in TILES},
        "num_warps": found.num_warps,
        "num_stages": found.num_stages,
        "us": round(best, 2),
        "own_us": round(own, 2),
    }


def _built(source: Source, kernel: str, arch: str) -> Cubin | None:
    """None for a tile that spills, or that the chip has no room for."""
    try:
        return build(source, kernel, source.function.__name__, arch)
    except Exception:  # noqa: BLE001  (Triton's own, of which there are many)
        return None


def merge(entries: list[dict[str, Any]], path: Path) -> None:
    """Put entries in place of those of the same kernel and shape."""
    stored = json.loads(path.read_text()) if path.exists() else []
    new = {json.dumps([entry["kernel"], entry["shape"]]) for entry in entries}
    kept = [entry for entry in stored if json.dumps([entry["kernel"], entry["shape"]]) not in new]
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps([*kept, *entries], indent=1) + "\n")
    partial.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", default=list(SHAPES))
    parser.add_argument("--int8", action="store_true", help="the products of --quantize int8")
    parser.add_argument("--minutes", type=float, default=8.0, help="then no further tile is tried")
    parser.add_argument("--out", type=Path, default=FOLDER, help="the folder of CHIP.json")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the program itself")
    arguments = parser.parse_args()
    try:
        driver = Driver()
    except InfercError as error:
        sys.exit(f"gpu_tune.py: {error}")
    until = time.monotonic() + 60 * arguments.minutes
    bed = Bed(driver, 1 << 16 if arguments.tiny else COLD_BYTES, 1 << 21 if arguments.tiny else ARGUMENT_BYTES)
    done: set[str] = set()
    for shape in arguments.shapes:
        step = random_step(TINY if arguments.tiny else shape, driver.arch, "int8" if arguments.int8 else None)
        entries = []
        for name, source in step.sources.items():
            kernel = name.rpartition("-")[0]
            key = json.dumps([kernel, shape_of(source)])
            if kernel in KERNELS and key not in done:
                done.add(key)
                entry = tune(bed, kernel, source, until)
                print(json.dumps({name: entry}), flush=True)
                entries += [entry] if entry else []
        merge(entries, arguments.out / f"{driver.arch}.json")
    bed.close()


if __name__ == "__main__":
    main()
