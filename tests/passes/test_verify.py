from typing import Any

import pytest
import torch
from graphs import Example, example, random, rows
from torch import ops

from inferc.errors import VerifyError
from inferc.ir import weights as weight_lib
from inferc.passes.verify import CAPTURED, LOWERED, SERVABLE, check_ops, verify

aten, inferc = ops.aten, ops.inferc


def made() -> Example:
    def graph(x: Any, w: Any) -> Any:
        return aten.neg.default(aten.relu.default(aten.linear.default(x, w)))

    return example(graph, {"x": rows(8)}, {"w": random(6, 8)})


def node_of(program: Any, target: Any) -> Any:
    (node,) = program.graph.find_nodes(op="call_function", target=target)
    return node


def test_a_sound_program_passes() -> None:
    verify(made().program)


def test_a_wrong_type_is_drawn() -> None:
    program = made().program
    relu = node_of(program, aten.relu.default)
    relu.meta["val"] = program.fake((relu.meta["val"].shape[0], 7), torch.float32)
    with pytest.raises(VerifyError) as error:
        verify(program)
    assert "relu_default is declared float32[s" in str(error.value)
    assert "its op says float32[s" in str(error.value)
    (marked,) = [line for line in str(error.value).splitlines() if line.startswith("  --> ")]
    assert "float32[s0, 7] = aten.relu" in marked


def test_a_missing_type() -> None:
    program = made().program
    del node_of(program, aten.relu.default).meta["val"]
    with pytest.raises(VerifyError, match="relu_default has no type"):
        verify(program)


def test_arguments_that_do_not_fit() -> None:
    program = made().program
    linear = node_of(program, aten.linear.default)
    linear.args = (linear.args[0], linear.args[0])
    with pytest.raises(VerifyError, match="linear_default cannot be typed|linear_default is declared"):
        verify(program)


def test_weights() -> None:
    program = made().program
    program.weights["spare"] = program.weights["w"]
    with pytest.raises(VerifyError, match="weights that nothing reads: spare"):
        verify(program)
    del program.weights["spare"]
    program.weights["w"] = weight_lib.slice_(program.weights["w"], 0, 0, 5)
    with pytest.raises(VerifyError, match=r"w is float32\[6, 8\], its weight float32\[5, 8\]"):
        verify(program)
    del program.weights["w"]
    with pytest.raises(VerifyError, match="reads weight w, which the program does not have"):
        verify(program)


def test_a_node_used_before_it_is_defined() -> None:
    program = made().program
    relu, neg = node_of(program, aten.relu.default), node_of(program, aten.neg.default)
    relu.prepend(neg)
    with pytest.raises(VerifyError, match=r"(?s)neg_default reads relu_default, which is after it\n.*--> %1"):
        verify(program)


def test_each_checkpoint_has_its_ops() -> None:
    program = made().program
    check_ops(program, CAPTURED)
    check_ops(program, SERVABLE)
    with pytest.raises(VerifyError, match="aten.relu is not an op of a lowered program"):
        check_ops(program, LOWERED)

    def attention(x: Any) -> Any:
        return inferc.attention.default(x, x, x, None, 0.5, "causal", 0, 0.0)

    captured = example(attention, {"x": rows(2, 8)}).program
    check_ops(captured, CAPTURED)
    with pytest.raises(VerifyError, match="inferc.attention is not an op of a servable program"):
        check_ops(captured, SERVABLE)
    fused = example(lambda x: inferc.silu_mul.default(x, x), {"x": rows(8)}).program
    check_ops(fused, LOWERED)
    with pytest.raises(VerifyError, match="inferc.silu_mul is not an op of a captured program"):
        check_ops(fused, CAPTURED)
