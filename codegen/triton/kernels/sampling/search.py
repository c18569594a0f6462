"""The functions by which one program searches logits in memory: for a threshold, and for the entries that reach it."""

from __future__ import annotations

import triton
import triton.language as tl

PLACES = tl.constexpr(64)  # the number of maxima kept per part of a row, each over every 64th token of the part
PIVOTS = tl.constexpr(8)  # pivots of `threshold` in one pass
MAX_SCALE = tl.constexpr(3.4028234663852886e38)


@triton.jit
def scale_of(temperature):  # type: ignore[no-untyped-def]
    return tl.minimum(tl.div_rn(1.0, temperature), MAX_SCALE)


@triton.jit
def odds(x, top, scale):  # type: ignore[no-untyped-def]
    """Return unnormalised probabilities, exp((x - top) * scale), which are 1 for the logit `top`."""
    return tl.exp((x - top) * scale)


@triton.jit
def order_of(x):  # type: ignore[no-untyped-def]
    """Return integers that have the same order as the floats."""
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
    """Return the largest value in [least, most] for which the entries at or above it weigh at least `target` together.

    `target` is a float64. `count` values are searched. If all of them together weigh less, the result is `least`. The
    second result is the weight of the values above the threshold. Each value weighs 1. With `by_odds`, the numbers are
    the values' odds, and each weighs its odds. A pass cuts what is left of the interval in eight.
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
    """Append the elements of x where `wanted` is set, and their token ids, to a list of `count` entries.

    Returns the number of entries that the list then has.
    """
    one = wanted.to(tl.int32)
    place = count + tl.cumsum(one, 0) - one
    tl.store(list_values_ptr + place, x, mask=wanted)
    tl.store(list_ids_ptr + place, token, mask=wanted)
    return count + tl.sum(one)


@triton.jit  # type: ignore[untyped-decorator]
def passing(weights, goal, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the index of the first of COUNT weights at which their running sum exceeds `goal`.

    If rounding leaves none, it is the last weight above 0. A weight of 0 is never chosen.
    """
    i = tl.arange(0, COUNT)
    seen = tl.cumsum(weights, 0).to(tl.float64)
    last = tl.max(tl.where(weights > 0.0, i, 0))
    return tl.minimum(tl.min(tl.where((seen > goal) & (weights > 0.0), i, last)), last)
