"""Fuse the residual addition into the projection that writes its rows, and bring a parallel residual into that form.

Each projection into the residual stream saves one read and one write of a [num_tokens, hidden_size] activation.
"""

from __future__ import annotations

from torch import Tensor, ops

from inferc.passes.rewrite import Rewrite

aten, inferc = ops.aten, ops.inferc


def with_bias(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    return aten.add.Tensor(residual, aten.linear.default(x, weight, bias))


def fused(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    return inferc.linear_add.default(x, weight, bias, residual)


def check(x: Tensor, weight: Tensor, residual: Tensor) -> str | None:
    wanted = [str(x.shape[0]), str(weight.shape[0])]
    if [str(size) for size in residual.shape] != wanted or residual.dtype != x.dtype:
        return f"the residual is {residual.dtype}{list(residual.shape)}, the projection {x.dtype}[{', '.join(wanted)}]"
    return None


def parallel(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, weight2: Tensor, bias2: Tensor | None, residual: Tensor
) -> Tensor:
    both = aten.add.Tensor(aten.linear.default(x, weight, bias), aten.linear.default(y, weight2, bias2))
    return aten.add.Tensor(residual, both)


def one_after_the_other(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, weight2: Tensor, bias2: Tensor | None, residual: Tensor
) -> Tensor:
    return inferc.linear_add.default(y, weight2, bias2, inferc.linear_add.default(x, weight, bias, residual))


fuse_parallel_residual = Rewrite("fuse_parallel_residual", parallel, one_after_the_other, (check,))
fuse_linear_add = Rewrite("fuse_linear_add", with_bias, fused, (check,))
