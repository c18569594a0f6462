"""The functions that draw a token by inverting the cumulative distribution, in the order of ids.

They draw from a whole row, or from what filters leave of it. Filters list the numbers that may matter, usually few, and
search for exact thresholds among those.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inferc.codegen.triton.kernels.sampling.narrow import exclude_top, keep_typical
from inferc.codegen.triton.kernels.sampling.rows import load_row
from inferc.codegen.triton.kernels.sampling.search import PLACES, append, odds, passing, threshold

MIN_NORMAL = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def least_of(low, top, scale):  # type: ignore[no-untyped-def]
    """Return a lower bound of the logits whose unnormalised probability (see `odds`) is at least `low`.

    Some numbers with slightly lower odds are above it as well.
    """
    x = top + (tl.log(tl.maximum(low, MIN_NORMAL)) - 0.001) / scale
    return tl.where(low >= MIN_NORMAL, x, float("-inf"))


@triton.jit  # type: ignore[untyped-decorator]
def draw_of_part(  # type: ignore[no-untyped-def]
    values_ptr, mass, maxima, top, scale, u, VOCAB: tl.constexpr, PART: tl.constexpr, PARTS_BLOCK: tl.constexpr
):
    """Draw from the whole row, without filters.

    `mass` is that of each part, relative to the part's largest number, which `maxima` has.
    """
    part = tl.arange(0, PARTS_BLOCK)
    share = odds(maxima, top, scale)
    weight = mass.to(tl.float64) * share.to(tl.float64)
    goal = u * tl.sum(weight)
    picked = passing(weight, goal, PARTS_BLOCK)
    goal -= tl.sum(tl.where(part < picked, weight, 0.0))
    goal /= tl.max(tl.where(part == picked, share, 0.0)).to(tl.float64)
    i = picked * PART + tl.arange(0, PART)
    x = load_row(values_ptr, i, VOCAB)
    own = odds(x, tl.max(tl.where(part == picked, maxima, float("-inf"))), scale)
    return picked * PART + passing(own, goal, PART)


@triton.jit  # type: ignore[untyped-decorator]
def collect(  # type: ignore[no-untyped-def]
    values_ptr,
    list_values_ptr,
    list_ids_ptr,
    maxima,
    least,
    VOCAB: tl.constexpr,
    PART: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
):
    """List the numbers of a row that are at least `least`, by ascending id, and return how many there are.

    `maxima` has the largest number of each part. Only parts with a number to list are read, each while the one before
    it is being listed.
    """
    parts, within = tl.arange(0, PARTS_BLOCK), tl.arange(0, PART)
    reached = maxima >= least
    count = tl.full((), 0, tl.int32)
    part = tl.min(tl.where(reached, parts, PARTS_BLOCK))
    x = load_row(values_ptr, part * PART + within, VOCAB)
    while part < PARTS_BLOCK:
        following = tl.min(tl.where(reached & (parts > part), parts, PARTS_BLOCK))
        ahead = load_row(values_ptr, following * PART + within, VOCAB)
        i = part * PART + within
        count = append(list_values_ptr, list_ids_ptr, count, x, i, (x >= least) & (i < VOCAB))
        part, x = following, ahead
    tl.debug_barrier()
    return count


@triton.jit  # type: ignore[untyped-decorator]
def listed_odds(list_values_ptr, start, count, least, top, scale, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the odds of a list's numbers from `start` on, 0 for those below `least`."""
    i = start + tl.arange(0, TILE)
    x = tl.load(list_values_ptr + i, mask=i < count, other=float("-inf"))
    return tl.where(x >= least, odds(x, top, scale), 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def mass_of(list_values_ptr, count, least, top, scale, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    mass = tl.full((), 0.0, tl.float64)
    for start in range(0, count, TILE):
        mass += tl.sum(listed_odds(list_values_ptr, start, count, least, top, scale, TILE)).to(tl.float64)
    return mass


@triton.jit  # type: ignore[untyped-decorator]
def end_of_ties(list_values_ptr, count, cut, ties, least, top, scale, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the place in a list behind the first `ties` odds that equal `cut`, which is above 0."""
    end, start, left = count, 0, ties
    while (left > 0) & (start < count):
        equal = listed_odds(list_values_ptr, start, count, least, top, scale, TILE) == cut
        nth = tl.cumsum(equal.to(tl.int32), 0)
        place = start + 1 + tl.arange(0, TILE)
        end = tl.minimum(end, tl.min(tl.where(equal & (nth == left), place, count)))
        left -= tl.max(nth)
        start += TILE
    return end


@triton.jit  # type: ignore[untyped-decorator]
def kept_odds(  # type: ignore[no-untyped-def]
    list_values_ptr, start, count, least, cut, ties_end, min_p, top, scale, TILE: tl.constexpr
):
    """Return `listed_odds`, set to 0 where filters drop a number.

    Those are odds below `cut`, odds equal to it from `ties_end` on, and odds less than min_p.
    """
    each = listed_odds(list_values_ptr, start, count, least, top, scale, TILE)
    kept = (each > cut) | ((each == cut) & (start + tl.arange(0, TILE) < ties_end))
    return tl.where(kept & (each >= min_p), each, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def draw_of_list(  # type: ignore[no-untyped-def]
    list_values_ptr, list_ids_ptr, count, least, cut, ties_end, min_p, top, scale, u, TILE: tl.constexpr
):
    """Draw a token from what `kept_odds` leaves."""
    total = tl.full((), 0.0, tl.float64)
    last = 0  # where the last tile begins that may be drawn from
    for start in range(0, count, TILE):
        mass = tl.sum(kept_odds(list_values_ptr, start, count, least, cut, ties_end, min_p, top, scale, TILE))
        total += mass.to(tl.float64)
        last = tl.where(mass > 0.0, start, last)
    goal = u * total
    start = 0
    weights = kept_odds(list_values_ptr, start, count, least, cut, ties_end, min_p, top, scale, TILE)
    mass = tl.sum(weights).to(tl.float64)
    while (start < last) & (mass <= goal):
        goal -= mass
        start += TILE
        weights = kept_odds(list_values_ptr, start, count, least, cut, ties_end, min_p, top, scale, TILE)
        mass = tl.sum(weights).to(tl.float64)
    return tl.load(list_ids_ptr + start + passing(weights, goal, TILE))


@triton.jit  # type: ignore[untyped-decorator]
def draw_filtered(  # type: ignore[no-untyped-def]
    values_ptr,
    tops_ptr,
    list_values_ptr,
    list_ids_ptr,
    maxima,
    mass,
    top,
    scale,
    top_k,
    top_p,
    min_p,
    typical_p,
    excludes,
    xtc_threshold,
    u,
    VOCAB: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Draw after top-k, then top-p of the mass that top-k left, min-p, typical-p, and with `excludes` XTC.

    `mass` is that of the whole row, `maxima` has the largest number of each part.
    """
    has_k = (top_k > 0) & (top_k < VOCAB)
    has_p = top_p < 1.0
    k, share = top_k.to(tl.float64), top_p.to(tl.float64)
    # Odds are too small to matter to top-p if VOCAB tokens of twice these odds would not make up the mass it drops.
    low = tl.where(has_p, ((mass - mass * share) / VOCAB * 0.5).to(tl.float32), 0.0)
    most, least = tl.full((), 1.0, tl.float32), tl.full((), float("-inf"), tl.float32)
    if has_k | has_p:  # a threshold among some of the numbers is a lower bound of the one among all
        begin, end = tl.where(has_k, least, low), tl.where(has_k, top, most)
        target = tl.where(has_k, k, mass * share)
        bound, _ = threshold(tops_ptr, PARTS * PLACES, target, begin, end, has_k == 0, top, scale, TILE)
        least, low = tl.where(has_k, bound, least), tl.where(has_k, 0.0, bound)
    if has_k == 0:
        least = least_of(tl.maximum(low, min_p), top, scale)
    count = collect(values_ptr, list_values_ptr, list_ids_ptr, maxima, least, VOCAB, PART, PARTS_BLOCK)
    if has_k:
        least, _ = threshold(list_values_ptr, count, k, least, top, False, top, scale, TILE)
        mass = mass_of(list_values_ptr, count, least, top, scale, TILE)
        low = odds(least, top, scale)
    cut = tl.full((), 0.0, tl.float32)
    ties_end = count
    if has_p:  # of the odds that equal the cut, keep as many as it takes to reach the share
        cut, above = threshold(list_values_ptr, count, mass * share, low, most, True, top, scale, TILE)
        if cut > 0.0:
            room = tl.ceil((mass * share - above) / cut.to(tl.float64))
            ties = tl.maximum(tl.minimum(room, count.to(tl.float64)).to(tl.int32), 1)
            ties_end = end_of_ties(list_values_ptr, count, cut, ties, least, top, scale, TILE)
    if (typical_p < 1.0) | excludes:  # what is left becomes the list, of which a token with any odds may be drawn
        tl.debug_barrier()
        for start in range(0, count, TILE):
            i = start + tl.arange(0, TILE)
            kept = kept_odds(list_values_ptr, start, count, least, cut, ties_end, min_p, top, scale, TILE) > 0.0
            x = tl.load(list_values_ptr + i, mask=i < count, other=float("-inf"))
            tl.store(list_values_ptr + i, tl.where(kept, x, float("-inf")), mask=i < count)
        tl.debug_barrier()
        least, min_p = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32)
        cut, ties_end = tl.full((), 0.0, tl.float32), count
        if typical_p < 1.0:
            keep_typical(list_values_ptr, count, typical_p, top, scale, TILE)
        if excludes:
            exclude_top(list_values_ptr, count, xtc_threshold, top, scale, TILE)
    return draw_of_list(list_values_ptr, list_ids_ptr, count, least, cut, ties_end, min_p, top, scale, u, TILE)
