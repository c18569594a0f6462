"""An analytical cost model that chooses the cache blocking of each matrix product at compile time.

A product of rows by a weight of n outputs over k is cut in three ways (`Blocking` in kernels/gemm.h): how many rows
pass by the weight before the next rows do; how many bytes of k are taken at a time; and, on tiles, how many pairs of
panels a piece of k goes through while their sums wait. The cuts do not change a result: an output adds up k in
ascending order whatever they are. The number of rows of a step is not known when a model is compiled, so a product has
a choice for each of several numbers of rows.

The model counts cycles of one core, as analytical models of such products do (Low, Igual, Smith, Quintana-Ortí,
"Analytical modeling is enough for high-performance BLIS", TOMS 2016): the arithmetic, the traffic between the caches,
the begin and the end of each pass of the innermost loop, and the writing of the outputs. `benchmarks/blocking.py`
compares it with the measured time of every choice, and `inferc bench kernels` with that of a model's own products.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

ROWS = (4, 12, 64, 128, 256, 512, 2048)
"""The numbers of rows that a product has a choice for; the last choice also serves all larger numbers."""
ANY_ROWS = (1 << 31) - 1  # as in gemm.h
FEW_ROWS = 4  # where there are tiles, integer products of up to so many rows use vectors instead
MOST_PAIRS = 16
PANEL = 16  # outputs
WIDE_BYTES = 1024  # bytes of a row per block where the weight is widened: fixed by the kernels
COPIED_BYTES = 2 << 20  # most bytes in a block of rows that are no whole tiles: such a block is copied to the stack


@dataclass(frozen=True)
class Core:
    """A core as the cost model sees it; rates are in bytes or operations per cycle, fitted to measurements."""

    rows: int  # rows that the innermost loop multiplies at a time
    columns: int  # outputs that the innermost loop computes at a time
    most_rows: int  # the most rows of a block that the kernel has room for
    operations: dict[int, float]  # peak operations per cycle of a product, by the bytes of an element
    # share of that peak that the innermost loop reaches with all its data in the first-level cache
    reached: dict[int, float]
    l1_bytes: int
    l2_bytes: int
    l1_kept: tuple[float, float] = (1.19, 1.62)
    l2_kept: tuple[float, float] = (0.05, 1.63)
    """When a cache has lost a line, as a range of the bytes that passed since the line was last used.

    Both bounds are fractions of the cache's size: from the first on, lines may be gone; from the second on, all are. It
    is a range because pages fall on the sets of a cache by chance.
    """
    from_l2: float = 47.0
    from_l3: float = 21.0
    sums: float = 128.0  # sums that wait between blocks of k, written to or read from the second-level cache
    fetched: float = 9.3  # weights, each line of which takes the place of a line that could be loaded instead
    contended: float = 0.015  # extra cycles per byte of weights where the first-level cache cannot hold its block
    memory: float = 4.6  # the most bytes of weights from memory if all cores read
    four_bits: float = 1.0  # share of `reached` that is left where weights in four bits are unpacked meanwhile
    overlap: float = 0.65  # the share of the shorter of arithmetic and traffic that hides behind the longer
    visit: float = 213.0  # cycles to begin and to end one pass of the innermost loop
    output: float = 17.6  # cycles to write 16 outputs
    has_tiles: bool = False

    def row_byte(self, passed: float) -> float:
        """Return the cycles to load a byte of a row after `passed` other bytes were used since its last use."""
        gone = _share(passed / self.l2_bytes, self.l2_kept)
        return (1 - gone) / self.from_l2 + gone / self.from_l3


def _share(value: float, between: tuple[float, float]) -> float:
    return min(1.0, max(0.0, (value - between[0]) / (between[1] - between[0])))


_TILES = Core(
    32,
    32,
    512,
    {2: 1024.0, 1: 2048.0},
    {2: 1.0, 1: 1.0},
    l1_bytes=48 << 10,
    l2_bytes=2 << 20,
    four_bits=0.3,
    has_tiles=True,
)
# Vector code is bound by its own arithmetic and little else.
_AVX512 = Core(
    6,
    64,
    192,
    {4: 64.0, 2: 128.0, 1: 256.0},
    {4: 0.97, 2: 0.97, 1: 0.79},
    l1_bytes=32 << 10,
    l2_bytes=1 << 20,
    overlap=1.0,
    visit=8.0,
    output=5.0,
)
_NARROW = Core(
    4,
    16,
    192,
    {4: 32.0, 2: 32.0, 1: 64.0},
    {4: 0.97, 2: 0.97, 1: 0.65},
    l1_bytes=32 << 10,
    l2_bytes=512 << 10,
    overlap=0.8,
    visit=8.0,
    output=8.0,
)
CORES = {"amx": _TILES, "avx512": _AVX512, "avx2": _NARROW, "neon_bf16": _NARROW, "neon": _NARROW}


@dataclass(frozen=True)
class Product:
    """A matrix product as the model sees it."""

    n: int
    k: int
    row_size: int  # bytes of an element of the rows
    weight_bytes: float  # of an element of the weight: 0.5 in four bits
    most_pairs: int = MOST_PAIRS  # the most pairs of panels that a piece has

    @property
    def name(self) -> str:
        """The name of the product's choices in the generated code: bits of rows and weight, and sizes."""
        pieces = "" if self.most_pairs == MOST_PAIRS else f"_IN_{self.most_pairs}"
        return f"BLOCKING_{8 * self.row_size}X{round(8 * self.weight_bytes)}_{self.n}_{self.k}{pieces}"

    @property
    def widens(self) -> bool:
        """True if the weight is widened to the rows' type in the first-level cache."""
        return self.weight_bytes < self.row_size


@dataclass(frozen=True)
class Blocking:
    """The cuts of one product, as `Blocking` in gemm.h."""

    rows: int
    k_bytes: int
    pairs: int = 1


@dataclass(frozen=True)
class Choice:
    """The blocking chosen for up to `up_to` rows, and the share of the core's peak that it should reach."""

    up_to: int
    blocking: Blocking
    of_peak: float


def core_of(isa: str, product: Product, rows: int) -> Core:
    """Return the core that a product runs on: tiles have no float32, and integers of few rows use vectors."""
    has_vectors = product.row_size == 4 or (product.row_size == 1 and rows <= FEW_ROWS)
    return CORES["avx512" if isa == "amx" and has_vectors else isa]


def cycles(core: Core, product: Product, rows: int, blocking: Blocking) -> float:
    """Return the cycles that one core would take for the whole product."""
    size, k_bytes = product.row_size, product.k * product.row_size
    height, block = min(rows, blocking.rows), min(blocking.k_bytes, k_bytes)
    blocks_of_k, blocks_of_rows = -(-k_bytes // block), -(-rows // blocking.rows)
    tiles = -(-rows // core.rows) * -(-product.n // core.columns)
    reached = core.reached[size] * (core.four_bits if product.weight_bytes < 1 else 1.0)
    arithmetic = 2.0 * tiles * core.rows * core.columns * product.k / core.operations[size] / reached

    # Rows, with one pair of panels at a time: all of k passes by one group of columns after the other. With several
    # pairs, a block of k passes by several groups, and the first of them loads it anew. Between two uses of a row lie
    # the other rows, the sums beside them, and the weight.
    sums = 4 * height * core.columns
    beside = sums * (blocks_of_k > 1) + 2 * core.columns * block
    again = core.row_byte(height * (k_bytes if blocking.pairs == 1 else block) + beside)
    first = again if blocking.pairs == 1 else core.row_byte(height * k_bytes + sums * blocking.pairs)
    moving = tiles * core.rows * k_bytes * ((1 - 1 / blocking.pairs) * again + first / blocking.pairs)
    # The weight: it comes from memory once per block of rows, and again as far as rows drive it out of the L1 cache.
    weight = product.n * product.k * product.weight_bytes * blocks_of_rows
    held = (core.rows + core.columns) * block / core.l1_bytes
    driven_out = _share(held, core.l1_kept) if height > core.rows else 0.0
    moving += weight * (1 / core.fetched + core.contended * driven_out)
    moving += tiles * core.columns * k_bytes * driven_out / core.from_l2
    # Sums wait from one block of k to the next: they are written and read again.
    gone = _share((sums * blocking.pairs + height * block) / core.l2_bytes, core.l2_kept)
    passes = 2 * 4 * (blocks_of_k - 1) * tiles * core.rows * core.columns
    moving += passes * ((1 - gone) / core.sums + gone / core.from_l3)

    ends = tiles * blocks_of_k * core.visit + rows * product.n / PANEL * core.output
    busy = max(arithmetic, moving) + (1 - core.overlap) * min(arithmetic, moving) + ends
    return max(busy, weight / core.memory)


def candidates(core: Core, product: Product, rows: int) -> Iterator[Blocking]:
    """Yield the blockings that the kernels have room for, those with the fewest cuts first."""
    k_bytes = product.k * product.row_size
    unit, whole = core.most_rows // 8, -(-rows // core.rows) * core.rows
    heights = sorted({min(height, whole) for height in (unit, 2 * unit, 4 * unit, 6 * unit, 8 * unit)})
    if core.has_tiles and k_bytes % 64:
        heights = [height for height in heights if height * k_bytes <= COPIED_BYTES] or [core.rows]
    if product.weight_bytes < 1:
        blocks = [k_bytes]
    elif product.widens:
        blocks = [WIDE_BYTES]
    else:
        blocks = [block for block in (8192, 4096, 2048, 1024, 512) if block < 2 * k_bytes] or [512]
    for height in reversed(heights):
        for block in blocks:
            for pairs in (1, 2, 4, 8, 16) if core.has_tiles and product.weight_bytes >= 1 and block < k_bytes else (1,):
                if pairs <= product.most_pairs:
                    yield Blocking(height, block, pairs)


@lru_cache(maxsize=4096)
def choose(isa: str, product: Product, rows: int) -> Choice:
    """Return the blocking that costs least for a step of `rows` rows."""
    core = core_of(isa, product, rows)
    best = min(candidates(core, product, rows), key=lambda blocking: cycles(core, product, rows, blocking))
    peak = 2.0 * rows * product.n * product.k / core.operations[product.row_size]
    return Choice(rows, best, peak / cycles(core, product, rows, best))


def choices(isa: str, product: Product) -> list[Choice]:
    """Return a choice for each of ROWS, the last valid for any number of rows; equal neighbours are merged."""
    found: list[Choice] = []
    for rows in ROWS:
        choice = choose(isa, product, rows)
        if found and found[-1].blocking == choice.blocking:
            found.pop()
        found.append(choice)
    return [*found[:-1], replace(found[-1], up_to=ANY_ROWS)]
