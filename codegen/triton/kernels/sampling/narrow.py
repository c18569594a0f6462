"""The filters that leave a set with a hole or an upper end: typical-p, and exclude top choices (XTC).

They work on the list of the numbers that a row's other filters left, in place: what they drop becomes -inf. A barrier
stands between what one thread writes and another reads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inferc.codegen.triton.kernels.sampling.search import PIVOTS, odds, of_order

INFINITY = tl.constexpr(0x7F800000)  # its place in the order of floats


@triton.jit
def log_odds(x, top, scale):  # type: ignore[no-untyped-def]
    """Return the logarithms of `odds`, and -inf for -inf."""
    return (x - top) * scale


@triton.jit  # type: ignore[untyped-decorator]
def listed(list_values_ptr, start, count, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    i = start + tl.arange(0, TILE)
    return tl.load(list_values_ptr + i, mask=i < count, other=float("-inf"))


@triton.jit  # type: ignore[untyped-decorator]
def radius(  # type: ignore[no-untyped-def]
    list_values_ptr, count, middle, target, top, scale, TILE: tl.constexpr
):
    """Return the least distance from `middle` within which the log odds of a list weigh at least `target`.

    A pass cuts what is left of the interval of floats in eight.
    """
    low, high = tl.full((), 0, tl.int64), tl.full((), INFINITY, tl.int64)
    while low < high:
        pivot = low + (high - low) * tl.arange(0, PIVOTS) // PIVOTS
        number = of_order(pivot)
        weight = tl.zeros((PIVOTS,), tl.float64)
        for start in range(0, count, TILE):
            y = log_odds(listed(list_values_ptr, start, count, TILE), top, scale)
            away = tl.abs(y - middle)
            each = tl.exp(y)
            weight += tl.sum(tl.where(away[:, None] <= number[None, :], each[:, None], 0.0), 0).to(tl.float64)
        enough = weight >= target
        high = tl.min(tl.where(enough, pivot, high))
        low = tl.max(tl.where(enough, low, pivot + 1))
    return of_order(high)


@triton.jit  # type: ignore[untyped-decorator]
def keep_typical(  # type: ignore[no-untyped-def]
    list_values_ptr, count, share, top, scale, TILE: tl.constexpr
):
    """Keep the numbers whose surprise is closest to the expected one, as few as have a share of the mass.

    Those as close as the last of these are kept, too. -log p differs from its mean as the log odds differ from theirs.
    Source: Meister et al. 2022, Locally Typical Sampling, arXiv:2202.00666.
    """
    mass, moment = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    for start in range(0, count, TILE):
        y = log_odds(listed(list_values_ptr, start, count, TILE), top, scale)
        p = tl.exp(y)
        mass += tl.sum(p.to(tl.float64))
        moment += tl.sum(tl.where(p > 0.0, p * y, 0.0).to(tl.float64))
    middle = (moment / mass).to(tl.float32)
    most = radius(list_values_ptr, count, middle, mass * share.to(tl.float64), top, scale, TILE)
    tl.debug_barrier()
    for start in range(0, count, TILE):
        i = start + tl.arange(0, TILE)
        x = listed(list_values_ptr, start, count, TILE)
        kept = tl.abs(log_odds(x, top, scale) - middle) <= most
        tl.store(list_values_ptr + i, tl.where(kept, x, float("-inf")), mask=i < count)
    tl.debug_barrier()


@triton.jit  # type: ignore[untyped-decorator]
def exclude_top(  # type: ignore[no-untyped-def]
    list_values_ptr, count, share, top, scale, TILE: tl.constexpr
):
    """Drop all numbers with at least a share of the mass but the least likely of them; of equal ones the last stays."""
    mass = tl.full((), 0.0, tl.float64)
    for start in range(0, count, TILE):
        mass += tl.sum(odds(listed(list_values_ptr, start, count, TILE), top, scale).to(tl.float64))
    least = (mass * share.to(tl.float64)).to(tl.float32)
    reached, stays = tl.full((), 0, tl.int32), tl.full((), -1, tl.int32)
    cut = tl.full((), float("inf"), tl.float32)
    for start in range(0, count, TILE):
        i = start + tl.arange(0, TILE)
        p = odds(listed(list_values_ptr, start, count, TILE), top, scale)
        reaches = (p >= least) & (p > 0.0)
        lowest = tl.min(tl.where(reaches, p, float("inf")))
        last = tl.max(tl.where(reaches & (p == lowest), i, -1))
        stays = tl.where((lowest <= cut) & (last >= 0), last, stays)
        cut = tl.minimum(cut, lowest)
        reached += tl.sum(reaches.to(tl.int32))
    tl.debug_barrier()
    if reached > 1:
        for start in range(0, count, TILE):
            i = start + tl.arange(0, TILE)
            x = listed(list_values_ptr, start, count, TILE)
            kept = (odds(x, top, scale) < cut) | (i == stays)
            tl.store(list_values_ptr + i, tl.where(kept, x, float("-inf")), mask=i < count)
    tl.debug_barrier()
