"""Choosing a kernel: a refusal gives the reasons once, in the words of the model."""

from typing import Any

import pytest
import torch
from graphs import example, random

from inferc.backends.lower import LowerConfig
from inferc.codegen.select import select
from inferc.errors import UnsupportedError
from inferc.targets import Target

aten, inferc = torch.ops.aten, torch.ops.inferc
PLACES = {
    "table": torch.tensor([[1, 2]], dtype=torch.int32),
    "starts": torch.tensor([0, 5], dtype=torch.int32),
    "lens": torch.tensor([5], dtype=torch.int32),
}


def attention(q: Any, cache: Any, table: Any, starts: Any, lens: Any) -> Any:
    return inferc.paged_attention.default(q, cache, table, starts, lens, None, 0, 0.5, "causal", 0, 0.0)


def refusal(function: Any, inputs: dict[str, torch.Tensor], op: Any, target: str = "cpu") -> str:
    (node,) = example(function, inputs).program.graph.find_nodes(op="call_function", target=op)
    with pytest.raises(UnsupportedError) as caught:
        select(node, Target.parse(target), LowerConfig(Target.parse(target)).kernels)
    return str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "dim", "block_size", "message"),
    [
        (4, 24, 16, "head_dim 24: expected a multiple of 16, at most 512"),
        (4, 1024, 16, "head_dim 1024: expected a multiple of 16, at most 512"),
        (97, 16, 16, "97 heads on 2 KV heads: expected a whole number on each"),
        (4, 16, 8, "block_size 8: expected a multiple of 16"),
    ],
)
def test_attention_that_does_not_fit(heads: int, dim: int, block_size: int, message: str, dtype: torch.dtype) -> None:
    cache = random(2, 1, 2, block_size, 2, dim, dtype=dtype)
    inputs = {"q": random(5, heads, dim, dtype=dtype), "cache": cache, **PLACES}
    found = refusal(attention, inputs, inferc.paged_attention.default)
    assert found == f"{message} (node paged_attention_default, target cpu)"


def test_a_dtype_without_a_kernel() -> None:
    inputs = {"x": random(5, 8).half(), "y": random(5, 8).half()}
    found = refusal(lambda x, y: aten.add.Tensor(x, y), inputs, aten.add.Tensor)
    assert found == (
        "aten.add.Tensor(float16[T, 8], float16[T, 8]): expected bfloat16 or float32 (node add_tensor, target cpu)"
    )


def test_shapes_without_a_kernel() -> None:
    inputs = {"x": random(5, 8), "y": random(5, 1)}
    found = refusal(lambda x, y: aten.mul.Tensor(x, y), inputs, aten.mul.Tensor)
    assert found == "aten.mul.Tensor of [T, 8] and [T, 1]: expected equal shapes (node mul_tensor, target cpu)"


@pytest.mark.parametrize(("op", "target"), [(aten.gelu, "cpu"), (aten.neg, "cuda:sm_90")])
def test_an_op_without_a_kernel(op: Any, target: str) -> None:
    name = op.default.name().split("::")[1]
    found = refusal(lambda x: op.default(x), {"x": random(5, 8)}, op.default, target)
    assert found == (
        f"inferc cannot run aten.{name} yet (node {name}_default):"
        f" this model's family is not supported on target {target}"
    )
