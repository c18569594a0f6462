from typing import Any

import torch
from graphs import example, random, rows
from torch import ops

from inferc.ir import weights as weight_lib
from inferc.passes.normalize.fold_constants import FoldConstants

aten = ops.aten


def test_what_is_computed_of_numbers_is_a_constant() -> None:
    def graph(x: Any) -> Any:
        how = {"dtype": torch.float32}
        steps = x.tracer.create_proxy("call_function", aten.arange.start_step, (0, 6, 2), how)
        power = aten.reciprocal.default(aten.pow.Scalar(10000.0, aten.div.Tensor(steps, 6)))
        return aten.mul.Tensor(x, aten.unsqueeze.default(power, 0))

    golden = """
        %x: float32[s0, 3] = input
        %0: float32[s0, 3] = aten.mul.Tensor(%x, @unsqueeze_default.constant)
        return (%0)
    """
    example(graph, {"x": rows(3)}).check(FoldConstants(), 1, golden)


def test_constants_that_are_only_rearranged_and_tensors_of_the_checkpoint_stay() -> None:
    def graph(x: Any, known: Any, weight: Any) -> Any:
        return aten.mul.Tensor(x, aten.unsqueeze.default(known, 0)), aten.mul.Tensor(x, aten.exp.default(weight))

    made = example(graph, {"x": rows(3)}, {"known": random(3), "weight": random(3)})
    made.program.weights["known"] = weight_lib.constant(random(3))
    made.check_untouched(FoldConstants())
