"""The kernel that chooses each token's experts and their weights.

It has one program per token, which holds the token's scores in registers by group and expert.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from inferc.codegen.triton.aot.source import COUNTS, POINTERS, Source
from inferc.codegen.triton.kernels.elementwise import sigmoid
from inferc.ir.ops.experts import GROUP_SCORES, SCORES

# The values of SCORE: what makes scores of logits, over all experts or over those that are chosen.
SOFTMAX, SIGMOID, CHOSEN_SOFTMAX, CHOSEN_SIGMOID = map(tl.constexpr, range(4))
assert SCORES[:4] == ("softmax", "sigmoid", "chosen_softmax", "chosen_sigmoid")
# GROUP_SCORE is this if a group's score is the sum of its two best experts', or else that of its best one.
TOP2_SUM = tl.constexpr(GROUP_SCORES.index("top2_sum"))


@triton.jit
def first_best(choice, left, place):  # type: ignore[no-untyped-def]
    """Return the lowest index in `place` that has the largest score in `choice`, among the candidates that are `left`.

    A NaN counts as the largest, as it does in sorting.
    """
    ranked = tl.where(choice != choice, float("inf"), choice)  # noqa: PLR0124  only a NaN differs from itself
    best = tl.max(tl.where(left, ranked, float("-inf")))
    return tl.min(tl.where(left & (ranked == best), place, 1 << 30))


@triton.jit  # type: ignore[untyped-decorator]
def moe_routing_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    counts_ptr,
    COUNT: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    LOGITS_STRIDE: tl.constexpr,
    IDS_STRIDE: tl.constexpr,
    WEIGHTS_STRIDE: tl.constexpr,
    SCORE: tl.constexpr,
    GROUP_SCORE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
):
    """Choose one token's experts and compute their weights.

    Expert g * SIZE + i is at (g, i). SCORE is one of SOFTMAX to CHOSEN_SIGMOID, and GROUP_SCORE
    may be TOP2_SUM.
    """
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(counts_ptr + COUNT):
        group, i = tl.arange(0, GROUP_BLOCK), tl.arange(0, SIZE_BLOCK)
        left = (group < GROUPS)[:, None] & (i < SIZE)[None, :]
        expert = tl.where(left, group[:, None] * SIZE + i[None, :], 1 << 30)
        scores = tl.load(logits_ptr + row * LOGITS_STRIDE + expert, mask=left, other=float("-inf")).to(tl.float32)
        if SCORE == SOFTMAX:
            scores = tl.exp(scores - tl.max(scores))
            scores /= tl.sum(scores)
        if SCORE == SIGMOID:
            scores = sigmoid(scores)
        choice = scores
        if HAS_BIAS:
            choice += tl.load(bias_ptr + expert, mask=left, other=0.0).to(tl.float32)
        if GROUPS > 1:
            inside = tl.where(left, choice, float("-inf"))
            best = tl.max(inside, 1)
            if GROUP_SCORE == TOP2_SUM:
                first = tl.argmax(inside, 1, tie_break_left=True)
                best += tl.max(tl.where(i[None, :] == first[:, None], float("-inf"), inside), 1)
            others = group < GROUPS
            for _ in range(TOP_GROUPS):
                others &= group != first_best(best, others, group)
            choice = tl.where(others[:, None], float("-inf"), choice)
        k = tl.arange(0, TOP_K_BLOCK)
        ids = tl.zeros((TOP_K_BLOCK,), tl.int32)
        weights = tl.full((TOP_K_BLOCK,), float("-inf"), tl.float32)
        for at in range(TOP_K):
            chosen = first_best(choice, left, expert)
            ids = tl.where(k == at, chosen, ids)
            weights = tl.where(k == at, tl.sum(tl.where(expert == chosen, scores, 0.0)), weights)
            left &= expert != chosen
        is_k = k < TOP_K
        if SCORE == CHOSEN_SOFTMAX:
            weights = tl.exp(weights - tl.max(weights))
            weights /= tl.sum(weights)
        if SCORE == CHOSEN_SIGMOID:
            weights = sigmoid(weights)
        if RENORMALIZE:
            weights /= tl.sum(tl.where(is_k, weights, 0.0))
        tl.store(ids_ptr + row * IDS_STRIDE + k, ids, mask=is_k)
        tl.store(weights_ptr + row * WEIGHTS_STRIDE + k, weights * SCALE, mask=is_k)


def moe_routing(
    dtypes: tuple[str, str],
    rows: str,
    experts: int,
    top_k: int,
    strides: tuple[int, int, int],
    score: str,
    *,
    has_bias: bool = False,
    renormalize: bool = False,
    scale: float = 1.0,
    groups: tuple[int, int, str] = (1, 1, "max"),
) -> Source:
    """Return the kernel of `inferc.moe_routing`, which chooses each token's experts and their weights.

    It reads logits [rows, experts] and bias [experts] of `dtypes`, and writes ids [rows, top_k] i32 and weights [rows,
    top_k] float32. `strides` are the elements from row to row of logits, ids and weights. `groups` is the number of
    groups, how many of them are kept, and by which score. Source: DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2.
    """
    num_groups, top_groups, group_score = groups
    names = ("LOGITS_STRIDE", "IDS_STRIDE", "WEIGHTS_STRIDE")
    constants: dict[str, Any] = {
        "COUNT": COUNTS[rows],
        "TOP_K": top_k,
        "GROUPS": num_groups,
        "SIZE": experts // num_groups,
        "TOP_GROUPS": top_groups,
        **dict(zip(names, strides, strict=True)),
        "SCORE": SCORES.index(score),
        "GROUP_SCORE": GROUP_SCORES.index(group_score),
        "HAS_BIAS": int(has_bias),
        "RENORMALIZE": int(renormalize),
        "SCALE": scale,
        "GROUP_BLOCK": triton.next_power_of_2(num_groups),
        "SIZE_BLOCK": triton.next_power_of_2(experts // num_groups),
        "TOP_K_BLOCK": triton.next_power_of_2(top_k),
    }
    return Source(
        function=moe_routing_kernel,
        signature={
            "logits_ptr": POINTERS[dtypes[0]],
            "bias_ptr": POINTERS[dtypes[1]],
            "ids_ptr": POINTERS["int32"],
            "weights_ptr": POINTERS["float32"],
            "counts_ptr": POINTERS["int32"],
        },
        constants=constants,
        grid=(f"num_{rows}", "1", "1"),
        num_warps=1 if experts <= 256 else 4,
    )
