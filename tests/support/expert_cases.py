"""The Triton kernels of mixtures of experts, over a sweep of shapes: as triton_cases has the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from triton_cases import BF16, F16, F32, SUMS, TOLERANCE, Case, behind, dtype_name, empty, numbers, ops

from inferc.codegen.triton.kernels.moe_experts import grouped_linear, sort_choices, sum_choices
from inferc.codegen.triton.kernels.moe_routing import moe_routing
from inferc.ir.ops.experts import activated

I32, I64 = torch.int32, torch.int64
TOLERANCE.setdefault(I32, 0.0)


def moe_routing_cases() -> Iterator[Case]:
    groups: tuple[int, int, str]
    for dtype, bias_dtype, rows, experts, top_k, score, renormalize, scale, groups in (
        (F32, None, 1, 1, 1, "softmax", False, 1.0, (1, 1, "max")),
        (BF16, None, 5, 8, 2, "softmax", True, 1.0, (1, 1, "max")),
        (F32, F32, 4, 60, 4, "softmax", True, 1.0, (1, 1, "max")),
        (BF16, BF16, 5, 32, 8, "sigmoid", True, 1.0, (1, 1, "max")),
        (BF16, None, 6, 40, 8, "chosen_softmax", False, 1.0, (1, 1, "max")),
        (F16, None, 3, 16, 1, "chosen_sigmoid", False, 1.0, (1, 1, "max")),
        (F32, BF16, 5, 256, 8, "sigmoid", True, 2.5, (8, 4, "top2_sum")),
        (F32, None, 5, 160, 6, "softmax", False, 16.0, (8, 3, "max")),
        (F32, F32, 3, 12, 3, "sigmoid", True, 1.0, (3, 1, "top2_sum")),
        (F32, None, 3, 12, 6, "softmax", False, 1.0, (3, 1, "max")),  # more than the groups that are kept have
        (F32, None, 3, 15, 2, "chosen_softmax", False, 1.0, (3, 2, "max")),
        (F32, None, 2, 512, 10, "softmax", True, 1.0, (1, 1, "max")),
    ):
        logits = (numbers(rows, experts) * 2).to(dtype)
        logits[0] = logits[0].round()  # ties
        bias = None if bias_dtype is None else (numbers(experts, seed=1) / 4).to(bias_dtype)
        ids, weights = ops.moe_routing(logits, bias, top_k, renormalize, score, scale, *groups)
        tensors = {"logits_ptr": logits, "ids_ptr": empty(rows, top_k, dtype=I32)}
        tensors["weights_ptr"] = empty(rows, top_k, dtype=F32)
        if bias is not None:
            tensors["bias_ptr"] = bias
        kinds = (dtype_name(dtype), dtype_name(dtype if bias_dtype is None else bias_dtype))
        source = moe_routing(
            kinds,
            "tokens",
            experts,
            top_k,
            (experts, top_k, top_k),
            score,
            has_bias=bias is not None,
            renormalize=renormalize,
            scale=scale,
            groups=groups,
        )
        name = f"{rows} x {top_k} of {experts} {dtype} {score} bias {bias_dtype} groups {groups}"
        expected = {"ids_ptr": behind(ids), "weights_ptr": behind(weights)}
        yield Case(name, source, tensors, expected, {"num_tokens": rows}, roundings=8)


def choices(rows: int, experts: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights as routing makes them; the last expert is nobody's choice where there are enough others."""
    some = max(top_k, experts - 1)
    ids = torch.stack([torch.randperm(some, generator=torch.Generator().manual_seed(row)) for row in range(rows)])
    return ids[:, :top_k].to(I32).contiguous(), numbers(rows, top_k).softmax(-1)


def sorted_choices(ids: torch.Tensor, experts: int) -> dict[str, torch.Tensor]:
    order = ids.flatten().sort(stable=True).indices.to(I32)
    begins = torch.bincount(ids.flatten(), minlength=experts).cumsum(0)
    return {"order_ptr": order, "begins_ptr": torch.cat((torch.zeros(1, dtype=I64), begins)).to(I32)}


def sort_choices_cases() -> Iterator[Case]:
    for rows, experts, top_k in ((1, 1, 1), (5, 4, 2), (3, 60, 6), (700, 3, 2)):
        ids, _ = choices(rows, experts, top_k)
        expected = {name: behind(each) for name, each in sorted_choices(ids, experts).items()}
        tensors = {name: empty(len(each) - 1, dtype=I32) for name, each in expected.items()}
        source = sort_choices("tokens", experts, top_k, top_k)
        name = f"{rows} x {top_k} of {experts}"
        yield Case(name, source, {"ids_ptr": ids, **tensors}, expected, {"num_tokens": rows})


def grouped_linear_cases() -> Iterator[Case]:
    for dtype, int8, rows, experts, top_k, n, k, gated, few, bias, how in (
        (BF16, False, 1, 4, 2, 32, 64, True, True, False, {}),
        (BF16, False, 17, 4, 2, 96, 72, False, True, False, {}),
        (
            BF16,
            False,
            70,
            3,
            2,
            100,
            64,
            True,
            False,
            True,
            {"activation": "swiglu_clamped", "alpha": 1.7, "limit": 1.0},
        ),
        (BF16, False, 70, 3, 2, 130, 64, False, False, True, {}),
        (BF16, False, 90, 3, 1, 32, 64, False, True, False, {}),  # several tiles of an expert
        (BF16, True, 20, 3, 2, 48, 64, True, True, False, {"activation": "gelu"}),
        (BF16, True, 40, 2, 1, 70, 64, False, False, True, {}),
        (F32, False, 33, 3, 2, 40, 48, True, False, False, {"activation": "gelu_tanh"}),
        (F32, True, 5, 6, 3, 24, 40, False, True, False, {}),
        (BF16, False, 9, 4, 1, 32, 64, True, True, False, {"scales_input": True}),
        (F16, False, 9, 4, 3, 32, 64, True, True, False, {"scales_input": True}),
    ):
        more: dict[str, Any] = how
        ids, share = choices(rows, experts, top_k)
        outputs = 2 * n if gated else n
        x = numbers(rows if gated else rows * top_k, k, dtype=dtype)
        weight = numbers(experts, outputs, k, seed=1) / k**0.5
        scale = numbers(experts, outputs, seed=2).abs() / 40
        shift = numbers(experts, outputs, dtype=dtype, seed=3) if bias else None
        weight = (weight * 40).round().to(torch.int8) if int8 else weight.to(dtype)
        tensors = {"x_ptr": x, "weight_ptr": weight, "share_ptr": share, **sorted_choices(ids, experts)}
        tensors.update({"bias_ptr": shift} if shift is not None else {}, **({"scale_ptr": scale} if int8 else {}))
        taken = x.repeat_interleave(top_k, 0) if gated else x
        if more.get("scales_input"):
            taken = (taken.float() * share.flatten()[:, None]).to(dtype)
        expected = torch.empty(rows * top_k, outputs, dtype=dtype)
        for choice, expert in enumerate(ids.flatten().tolist()):
            product = taken[choice].float() @ weight[expert].float().T
            product = product * scale[expert] if int8 else product
            expected[choice] = (product + (0.0 if shift is None else shift[expert].float())).to(dtype)
        if gated:
            gate, up = expected.chunk(2, -1)
            activation = more.get("activation", "silu")
            expected = activated(gate, up, activation, more.get("alpha", 1.0), more.get("limit", 0.0))
        tensors["out_ptr"] = empty(rows * top_k, n, dtype=dtype)
        source = grouped_linear(
            dtype_name(dtype),
            dtype_name(weight.dtype),
            "tokens",
            experts,
            top_k,
            n,
            k,
            (k, top_k),
            gated=gated,
            few=few,
            has_bias=bias,
            **more,
        )
        name = f"{rows} x {top_k} of {experts}, {n}x{k} {dtype} int8 {int8} gated {gated} few {few} bias {bias} {how}"
        roundings = SUMS if dtype == F32 else 4 if gated else 1  # gate and up are rounded before they are multiplied
        yield Case(name, source, tensors, {"out_ptr": behind(expected)}, {"num_tokens": rows}, roundings)


def sum_choices_cases() -> Iterator[Case]:
    for dtype, rows, experts, top_k, width, weighs in (
        (F32, 1, 1, 1, 1, True),
        (BF16, 5, 8, 2, 96, True),
        (F32, 3, 16, 6, 1025, True),
        (BF16, 4, 8, 3, 64, False),
        (F16, 2, 8, 8, 32, True),
        (F32, 4, 8, 3, 64, False),
    ):
        ids, share = choices(rows, experts, top_k)
        x = numbers(rows * top_k, width, dtype=dtype)
        order = ids.sort(1).indices
        if dtype == F32 and not weighs:  # in another order the sum would be another one
            for token, (first, *_, last) in enumerate(order.tolist()):
                x[token * top_k + first], x[token * top_k + last] = 3e7, -3e7
        each = x.view(rows, top_k, width).float() * (share[..., None] if weighs else 1.0)
        expected = torch.zeros(rows, width)
        for k in order.unbind(1):
            expected += each[torch.arange(rows), k]
        tensors = {"x_ptr": x, "ids_ptr": ids, "share_ptr": share, "out_ptr": empty(rows, width, dtype=dtype)}
        source = sum_choices(dtype_name(dtype), "tokens", top_k, width, (top_k, top_k, width), weighs)
        name = f"{rows} x {top_k} of {experts}, {width} {dtype} weighs {weighs}"
        yield Case(name, source, tensors, {"out_ptr": behind(expected.to(dtype))}, {"num_tokens": rows})


KERNELS: dict[str, Callable[[], Iterator[Case]]] = {
    "moe_routing": moe_routing_cases,
    "sort_choices": sort_choices_cases,
    "grouped_linear": grouped_linear_cases,
    "sum_choices": sum_choices_cases,
}
"""The cases of each kernel."""
