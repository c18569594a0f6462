"""The random numbers of sampling, which are a pure function of key and counter.

Source: Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def uniform(seed, counter, STREAM: tl.constexpr = 0):  # type: ignore[no-untyped-def]
    """Return a float64 that is uniform in [0, 1), from 53 bits of Philox 4x32-10 at (seed, counter, STREAM).

    Both have the bits of a u64, as i64.
    """
    low = tl.full((), 0xFFFFFFFF, tl.uint64)
    seed, counter = seed.to(tl.uint64), counter.to(tl.uint64)
    key0, key1 = seed & low, seed >> 32
    word0, word1 = counter & low, counter >> 32
    word2, word3 = (word0 & 0) + STREAM, word0 & 0
    for _ in tl.static_range(10):
        a, b = word0 * 0xD2511F53, word2 * 0xCD9E8D57
        word0, word1, word2, word3 = (b >> 32) ^ word1 ^ key0, b & low, (a >> 32) ^ word3 ^ key1, a & low
        key0, key1 = (key0 + 0x9E3779B9) & low, (key1 + 0xBB67AE85) & low
    bits = ((word0 << 32) | word1) >> 11
    return bits.to(tl.int64).to(tl.float64) * 1.1102230246251565e-16
