"""Compare the compiler's cost model of CPU matrix products with measured times, for every way to tile each product.

    python benchmarks/blocking.py [--rows 128 512 2048] [--formats bfloat16 w8a8] [--isa amx] [--turns 3] [--out
    FILE.json]

For the products in a layer of Qwen3-0.6B and of Llama-3.2-1B it shows the tiling that `inferc compile` chooses
(`codegen/cpp/blocking.py`), the expected and the measured share of the processor's peak, and what the best of all
candidates reaches. Candidates run in turn, so that a slow moment of the machine affects all of them. If the last column
is far below one, the cost model does not fit this machine.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, astuple
from typing import Any

import torch
from gemm_onednn import DTYPES, Ours, median_seconds, parse, product
from measured import save
from rich.console import Console
from rich.progress import track
from rich.table import Table

from inferc.codegen.cpp.blocking import ANY_ROWS, Blocking, Product, candidates, choose, core_of, cycles

WEIGHT_BYTES = 256 << 20  # size of the weights that calls rotate through
# Warm-up and measured time of a candidate in each turn. They are short because products run all the time: none begins
# after a pause, in which the processor would lower its speed.
WARM_SECONDS, COUNTED_SECONDS = 0.03, 0.06


def measure(ours: Ours, format: str, rows: int, n: int, k: int, turns: int, peak: float) -> dict[str, Any]:
    size = DTYPES[format].itemsize
    multiplied = Product(n, k, size, size)
    core, chosen = core_of(ours.isa, multiplied, rows), choose(ours.isa, multiplied, rows)
    table = torch.zeros(1, 4, dtype=torch.int64)
    made = product(ours, format, rows, n, k, WEIGHT_BYTES, table)
    shares: dict[Blocking, list[float]] = {each: [] for each in candidates(core, multiplied, rows)}
    for _ in range(turns):
        for each, found in shares.items():
            table[0] = torch.tensor([ANY_ROWS, *astuple(each)])
            seconds = median_seconds(made.ours, WARM_SECONDS, COUNTED_SECONDS)
            found.append(made.operations / seconds / peak)
    medians = {each: statistics.median(found) for each, found in shares.items()}
    best = max(medians, key=lambda each: medians[each])
    least = made.operations / core.operations[size]
    return {
        "format": format,
        "product": [rows, n, k],
        "chosen": asdict(chosen.blocking),
        "best": asdict(best),
        "expected": chosen.of_peak,
        "found": medians[chosen.blocking],
        "of_best": medians[chosen.blocking] / medians[best],
        "candidates": {
            ", ".join(
                map(str, asdict(each).values())
            ): f"{least / cycles(core, multiplied, rows, each):.3f} {found:.3f}"
            for each, found in medians.items()
        },  # expected and measured shares of the peak
    }


def table_of(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="products of the peak, as they are cut and as they could be")
    for name in ("format", "rows x columns x k", "chosen: rows, bytes of k, pairs", "best"):
        table.add_column(name)
    for name in ("expected", "found", "of the best"):
        table.add_column(name, justify="right")
    for row in rows:
        cuts = (", ".join(map(str, row[each].values())) for each in ("chosen", "best"))
        shares = (f"{row[each]:.2f}" for each in ("expected", "found", "of_best"))
        table.add_row(row["format"], " x ".join(map(str, row["product"])), *cuts, *shares)
    return table


def main() -> None:
    options = parse(__doc__, [128, 512, 2048], 3)
    ours = Ours(options.isa, options.threads)
    peaks = {format: max(ours.peak(format) for _ in range(8)) for format in options.formats}
    rows = [
        measure(ours, format, num_rows, n, k, options.turns, peaks[format])
        for format, _, num_rows, n, k in track(options.cases, "products", console=Console(stderr=True))
    ]
    console = Console()
    console.print(table_of(rows))
    of_best = statistics.geometric_mean([row["of_best"] for row in rows])
    console.print(f"{ours.isa}: what is chosen reaches {of_best:.3f} of the best of all (geometric mean)")
    if options.out:
        save(
            {"isa": ours.isa, "threads": options.threads, "peaks": peaks, "of_best": of_best, "rows": rows}, options.out
        )


if __name__ == "__main__":
    main()
