"""Searches among numbers in memory by one program: thresholds, and lists of what reaches one."""

from __future__ import annotations

import triton
import triton.language as tl

PLACES = tl.constexpr(64)  # of a part, of which each has the largest of its tokens
PIVOTS = tl.constexpr(8)  # of `threshold`, in one pass
MAX_SCALE = tl.constexpr(3.4028234663852886e38)


@triton.jit
def scale_of(temperature):  # type: ignore[no-untyped-def]
    return tl.minimum(tl.div_rn(1.0, temperature), MAX_SCALE)


@triton.jit
def odds(x, top, scale):  # type: ignore[no-untyped-def]
    """Numbers in proportion to the probabilities; that of `top` is 1."""
    return tl.exp((x - top) * scale)


@triton.jit
def order_of(x):  # type: ignore[no-untyped-def]
    """Integers in the order of the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def of_order(order):  # type: ignore[no-untyped-def]
    bits = order.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def threshold(  # type: ignore[no-untyped-def]
    values_ptr, count, target, least, most, by_odds, top, scale, TILE: tl.constexpr
):
    """The largest number of [least, most] such that those of `count` values not below it weigh at least `target`, a
    float64, and what those above it weigh. `least` if all together weigh less.

    Each value weighs 1; if by_odds, the numbers are the values' odds, and each weighs itself. A pass cuts what is left of
    the interval in eight.
    """
    low, high = order_of(least), order_of(most)
    above = tl.full((), 0.0, tl.float64)
    while low < high:
        pivot = low + ((high - low) * (1 + tl.arange(0, PIVOTS)) + (PIVOTS - 1)) // PIVOTS
        number = of_order(pivot)
        weight = tl.zeros((PIVOTS,), tl.float64)
        for start in range(0, count, TILE):
            i = start + tl.arange(0, TILE)
            x = tl.load(values_ptr + i, mask=i < count, other=float("-inf"))
            x = tl.where(by_odds, odds(x, top, scale), x)
            each = tl.where(by_odds, x, 1.0)
            weight += tl.sum(tl.where(x[:, None] >= number[None, :], each[:, None], 0.0), 0).to(tl.float64)
        enough = weight >= target
        low = tl.max(tl.where(enough, pivot, low))
        high = tl.min(tl.where(enough, high, pivot - 1))
        above = tl.max(tl.where(enough, above, weight))
    return of_order(low), above


@triton.jit
def append(list_values_ptr, list_ids_ptr, count, x, token, wanted):  # type: ignore[no-untyped-def]
    """Puts what is wanted of x, and their ids, behind the `count` numbers of a list; how many there are then."""
    one = wanted.to(tl.int32)
    place = count + tl.cumsum(one, 0) - one
    tl.store(list_values_ptr + place, x, mask=wanted)
    tl.store(list_ids_ptr + place, token, mask=wanted)
    return count + tl.sum(one)


@triton.jit  # type: ignore[untyped-decorator]
def passing(weights, goal, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first of COUNT weights at which their running sum passes `goal`, the last one if rounding leaves none; those of
    weight 0 are never it."""
    i = tl.arange(0, COUNT)
    seen = tl.cumsum(weights, 0).to(tl.float64)
    last = tl.max(tl.where(weights > 0.0, i, 0))
    return tl.minimum(tl.min(tl.where((seen > goal) & (weights > 0.0), i, last)), last)
