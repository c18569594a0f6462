"""Compare the CPU matrix kernels for prefill with oneDNN's on prepacked weights, and with the processor's peak.

    python benchmarks/gemm_onednn.py [--rows 512 2048] [--formats bfloat16 w8a8] [--turns 5] [--out FILE.json]

The shapes are those of the products in a layer of Qwen3-0.6B and of Llama-3.2-1B. Both sides run in turn on the same
numbers, and their results are compared first. Weights rotate through more memory than a core's caches hold, as those of
a model's layers do. oneDNN is the one in torch. A side works for a while before its calls count: after a pause the
processor takes a tenth of a second to reach full speed for products, and has little more than half of it at first. The
peak is that of `inferc bench kernels`: tiles or vectors of numbers from registers. targets.toml sets how many times as
fast as oneDNN bfloat16 should be.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import statistics
import time
import tomllib
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from measured import save
from rich.console import Console
from rich.progress import track
from rich.table import Table

from inferc.codegen.cpp.blocking import Product as Multiplied
from inferc.codegen.cpp.blocking import choices
from inferc.codegen.cpp.build import ISAS, Unit, build
from inferc.codegen.cpp.table import PANELS
from inferc.codegen.cpp.unit import HEADERS
from inferc.cost.machine import measure_read
from inferc.ir.weights import LAYOUTS
from inferc.passes.lower.plan_memory import padded
from inferc.runtime.runners.cpu.abi import choose_isa
from inferc.system.resources import available_cores

SOURCE = r"""
#include "exchange.h"
#include "peak.h"
using namespace inferc;
#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT void* bench_open(int count) { return open_pool(count); }
EXPORT i64 peak_bfloat16(void* pool, i64 rounds) { return busy_team<bf16>(pool, rounds); }
EXPORT i64 peak_w8a8(void* pool, i64 rounds) { return busy_team<i8>(pool, rounds); }
// Rows are x_stride and out_stride elements apart; only w8a8 uses the scales.
EXPORT void multiply_bfloat16(void* pool, const bf16* x, i64 x_stride, const float*, i64 rows, const bf16* w,
                              const float*, i64 n, i64 k, const Blocking* blocking, bf16* out, i64 out_stride) {
  auto region = [&](Team& t) {
    linear<bf16, bf16>(t, {x, x_stride}, rows, Panels<bf16>{w, n, k, 0, blocking}, nullptr,
                       Rows<bf16>{out, out_stride});
  };
  parallel(pool, region);
}
EXPORT void multiply_w8a8(void* pool, const i8* x, i64 x_stride, const float* x_scale, i64 rows, const i8* w,
                          const float* scale, i64 n, i64 k, const Blocking* blocking, bf16* out, i64 out_stride) {
  auto region = [&](Team& t) {
    linear_w8a8<bf16>(t, {x, x_stride}, {x_scale, 1}, rows, Panels<i8>{w, n, k, 0, blocking}, scale, nullptr,
                      Written<bf16>{{}, {out, out_stride}});
  };
  parallel(pool, region);
}
"""
# Pairs (n, k) of a layer's products: QKV, attention output, gate and up, down.
SHAPES = {
    "qwen3-0.6b": ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)),
    "llama-3.2-1b": ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)),
}
FORMATS = ("bfloat16", "w8a8")
DTYPES = {"bfloat16": torch.bfloat16, "w8a8": torch.int8}
WEIGHT_BYTES = 512 << 20  # size of the weights that each side rotates through
WARM_SECONDS, COUNTED_SECONDS = 0.2, 0.3  # warm-up and measured time of a side in each turn
X_SCALE = 0.02


@dataclass
class Product:
    """One matrix product by inferc and by oneDNN; the argument of a call is the index of the weight to use."""

    ours: Callable[[int], torch.Tensor]
    theirs: Callable[[int], torch.Tensor]
    operations: int


class Ours:
    def __init__(self, isa: str, threads: int) -> None:
        self.isa = isa
        self.library = ctypes.CDLL(str(build([Unit(SOURCE)], HEADERS, (isa,))[isa]))
        self.library.bench_open.restype = ctypes.c_void_p
        self.pool = ctypes.c_void_p(self.library.bench_open(threads))

    def peak(self, format: str) -> float:
        """Measure the peak operations per second of all threads."""
        function = getattr(self.library, f"peak_{format}")
        function.restype = ctypes.c_int64
        start = time.perf_counter()
        operations = function(self.pool, ctypes.c_int64(400_000))
        return float(operations) / (time.perf_counter() - start)

    def blocking(self, format: str, n: int, k: int) -> torch.Tensor:
        """Return the tiling that a compile would choose, in the form that the kernel reads."""
        size = DTYPES[format].itemsize
        chosen = choices(self.isa, Multiplied(n, k, size, size))
        return torch.tensor([[each.up_to, *astuple(each.blocking)] for each in chosen])

    def multiply(self, format: str, *args: Any) -> None:
        as_c = [
            ctypes.c_void_p(arg.data_ptr()) if isinstance(arg, torch.Tensor) else ctypes.c_int64(arg) for arg in args
        ]
        getattr(self.library, f"multiply_{format}")(self.pool, *as_c)


def stride(width: int, itemsize: int) -> int:
    """Return the row stride in elements of the compiler's layout."""
    return padded(width * itemsize) // itemsize


def product(
    ours: Ours,
    format: str,
    rows: int,
    n: int,
    k: int,
    weight_bytes: int = WEIGHT_BYTES,
    blocking: torch.Tensor | None = None,
) -> Product:
    dtype = DTYPES[format]
    source = torch.Generator().manual_seed(0)
    if format == "w8a8":
        x, weight = (torch.randint(-127, 128, size, dtype=dtype, generator=source) for size in ((rows, k), (n, k)))
    else:
        x, weight = (torch.randn(size, generator=source).to(dtype) for size in ((rows, k), (n, k)))
    x_scale, scale = torch.full((rows,), X_SCALE), torch.full((n,), 0.01)
    places = max(1, weight_bytes // (n * k * dtype.itemsize))
    panels = LAYOUTS[PANELS[dtype]].pack(weight)
    ours_at = [panels.clone() for _ in range(places)]
    spaced = torch.zeros(rows, stride(k, dtype.itemsize), dtype=dtype)
    spaced[:, :k] = x
    out = torch.zeros(rows, stride(n, 2), dtype=torch.bfloat16)
    zeros = torch.zeros(n, dtype=torch.int64)
    table = ours.blocking(format, n, k) if blocking is None else blocking

    def multiply(index: int) -> torch.Tensor:
        at = (spaced, spaced.stride(0), x_scale, rows, ours_at[index % places], scale, n, k, table, out, out.stride(0))
        ours.multiply(format, *at)
        return out[:, :n]

    @cache
    def prepacked() -> list[torch.Tensor]:
        return [prepack(weight, rows) for _ in range(places)]

    def onednn(index: int) -> torch.Tensor:
        packed = prepacked()[index % places]
        rest: tuple[str, list[float], str] = ("none", [], "")  # no activation
        if format == "bfloat16":
            return torch.ops.mkldnn._linear_pointwise(x, packed, None, *rest)  # type: ignore[no-any-return]
        numbers = (X_SCALE, 0, packed, scale, zeros, None, 1.0, 0, torch.bfloat16)
        return torch.ops.onednn.qlinear_pointwise(x, *numbers, *rest)  # type: ignore[no-any-return]

    return Product(multiply, onednn, 2 * rows * n * k)


def prepack(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a weight [n, k] in oneDNN's packed format for products with `rows` rows."""
    if weight.dtype == torch.int8:
        return torch.ops.onednn.qlinear_prepack(weight, [rows, weight.shape[1]])  # type: ignore[no-any-return]
    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)  # type: ignore[no-any-return]


def check(made: Product) -> None:
    """Raise RuntimeError if the results of the two sides differ by more than bfloat16 rounding."""
    ours, theirs = made.ours(0).float(), made.theirs(0).float()
    apart = float((ours - theirs).abs().max() / theirs.abs().max())
    if not apart < 0.01:
        raise RuntimeError(f"products are {apart:.2g} of the largest apart; expected at most 0.01")


def compare(made: Product, turns: int) -> dict[str, list[float]]:
    """Return the operations per second of each side, from the median call time of every turn."""
    rates: dict[str, list[float]] = {"inferc": [], "onednn": []}
    for _ in range(turns):
        for call, found in zip((made.ours, made.theirs), rates.values(), strict=True):
            found.append(made.operations / median_seconds(call, WARM_SECONDS, COUNTED_SECONDS))
    return rates


def median_seconds(call: Callable[[int], torch.Tensor], warm: float, counted: float) -> float:
    times: list[float] = []
    begin = time.perf_counter()
    for index in itertools.count():
        start = time.perf_counter()
        call(index)
        end = time.perf_counter()
        if start - begin > warm:
            times.append(end - start)
        if end - begin > warm + counted and times:
            break
    return statistics.median(times)


def table(rows: list[dict[str, Any]]) -> Table:
    found = Table(title="products of a prompt's rows, GFLOP/s or GOP/s, medians")
    for name in ("format", "layer of", "rows x columns x k"):
        found.add_column(name)
    for name in ("inferc", "oneDNN", "ratio", "of the peak", ""):
        found.add_column(name, justify="right")
    for row in rows:
        verdict = "" if "met" not in row else "met" if row["met"] else "short"
        rates = (f"{row[side] / 1e9:.0f}" for side in ("inferc", "onednn"))
        size = " x ".join(map(str, row["product"]))
        found.add_row(
            row["format"], row["shape"], size, *rates, f"{row['ratio']:.2f}", f"{row['of_peak']:.2f}", verdict
        )
    return found


def parse(description: str | None, rows: list[int], turns: int) -> argparse.Namespace:
    """Parse the command line of a benchmark of products; `cases` lists the products (format, shape, rows, n, k)."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=rows)
    parser.add_argument("--shape", dest="shapes", nargs="+", choices=SHAPES, default=tuple(SHAPES))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--turns", type=int, default=turns, choices=range(1, 1000), metavar="N")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--isa", default="auto", choices=("auto", *ISAS))
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.isa = choose_isa(options.isa, ISAS)
    options.cases = [
        (format, shape, rows, *size)
        for format in options.formats
        for shape in options.shapes
        for rows in options.rows
        for size in SHAPES[shape]
    ]
    return options


def main() -> None:
    options = parse(__doc__, [512, 2048], 5)
    targets = tomllib.loads((Path(__file__).parent / "targets.toml").read_text(encoding="utf-8"))
    asked = targets["own"]["products_to_onednn"]
    ours = Ours(options.isa, options.threads)
    reads = [measure_read(options.threads)]
    found: list[dict[str, Any]] = []
    peaks: dict[str, float] = {}
    for format, shape, rows, n, k in track(options.cases, "products", console=Console(stderr=True)):
        made = product(ours, format, rows, n, k)
        check(made)
        peaks[format] = max(peaks.get(format, 0.0), *(ours.peak(format) for _ in range(3)))
        rates = compare(made, options.turns)
        medians = {name: statistics.median(all_rates) for name, all_rates in rates.items()}
        row: dict[str, Any] = {"format": format, "shape": shape, "product": [rows, n, k], **medians, "all": rates}
        row["ratio"] = medians["inferc"] / medians["onednn"]
        if format == "bfloat16":
            row["met"] = row["ratio"] >= asked
        found.append(row)
    for row in found:
        row["of_peak"] = row["inferc"] / peaks[row["format"]]
    reads.append(measure_read(options.threads))
    Console().print(table(found))
    if options.out is not None:
        machine = {"isa": ours.isa, "read_gb_per_s": [read / 1e9 for read in reads], "peaks": peaks}
        save({**machine, "asked": asked, "rows": found}, options.out)


if __name__ == "__main__":
    main()
