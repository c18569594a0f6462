"""The IR's text, JSON and running."""

import json
import operator
from typing import Any

import pytest
import torch
from graphs import example, random, rows

from inferc.ir import weights as weight_lib
from inferc.ir.model_info import ModelInfo
from inferc.ir.program import KVGroup, find_target, from_json, target_name, to_json
from inferc.passes.verify import verify

aten, inferc = torch.ops.aten, torch.ops.inferc


def graph(x: Any, y: Any, w: Any) -> Any:
    both = inferc.rms_norm_add.default(aten.linear.default(x, w), y, aten.select.int(w, 0, 0), 1e-5, 0.0, True)
    cast = aten._to_copy.default(operator.getitem(both, 0), dtype=torch.bfloat16)
    return aten.cat.default([cast, cast], -1), operator.getitem(both, 1)


GOLDEN = """\
%x: float32[s0, 8] = input
%y: float32[s0, 8] = input
%0: float32[s0, 8] = aten.linear(%x, @w)
%1: float32[8] = aten.select.int(@w, 0, 0)
%2: (float32[s0, 8], float32[s0, 8]) = inferc.rms_norm_add(%0, %y, %1, 1e-05, 0.0, True)
%3: float32[s0, 8] = getitem(%2, 0)
%4: bfloat16[s0, 8] = aten._to_copy(%3, dtype=bfloat16)
%5: bfloat16[s0, 16] = aten.cat([%4, %4], -1)
%6: float32[s0, 8] = getitem(%2, 1)
return (%5, %6)
"""


def test_text_numbers_values_and_symbols_in_order() -> None:
    made = example(graph, {"x": rows(8), "y": rows(8)}, {"w": random(8, 8)})
    assert made.program.to_text() == GOLDEN


def test_text_shows_kernels_and_places() -> None:
    made = example(lambda x: aten.relu.default(x), {"x": rows(8)})
    made.program.output().all_input_nodes[0].meta.update(kernel="cpp.relu", place="T+0")
    assert "aten.relu(%x)  # cpp.relu, T+0\n" in made.program.to_text()


def test_json_restores_the_program() -> None:
    made = example(graph, {"x": rows(8), "y": rows(8, seed=1)}, {"w": random(8, 8)})
    program = made.program
    program.kv_groups = (KVGroup("window", (0, 2), 2, 16, 8, torch.bfloat16),)
    program.block_size, program.num_layers, program.info = 16, 3, ModelInfo(vocab_size=9)
    program.weights["w"] = weight_lib.cast(program.weights["w"], torch.float32)
    loaded = from_json(json.loads(json.dumps(to_json(program))))
    verify(loaded)
    assert loaded.to_text() == program.to_text()
    assert (loaded.kv_groups, loaded.weights, loaded.info) == (program.kv_groups, program.weights, program.info)
    assert [node.meta["name"] for node in loaded.graph.nodes if node.op != "output"] == [
        node.meta["name"] for node in program.graph.nodes if node.op != "output"
    ]
    expected = made.run()
    made.program = loaded
    torch.testing.assert_close(made.run(), expected)


def test_json_keeps_sizes_that_are_expressions() -> None:
    made = example(lambda x: aten.relu.default(x), {"x": rows(8)})
    program = made.program
    tokens = program.inputs()[0].meta["val"].shape[0]
    starts = program.graph.placeholder("starts")
    starts.meta.update(val=program.fake((tokens + 1,), torch.int32), name="starts", layer=None)
    loaded = from_json(json.loads(json.dumps(to_json(program))))
    assert loaded.to_text() == program.to_text()
    assert "int32[s0 + 1] = input" in loaded.to_text()


def test_targets_print_and_load() -> None:
    for target in (aten.linear.default, aten.add.Tensor, inferc.silu_mul.default, operator.getitem):
        assert find_target(target_name(target)) is target


def test_drop_unused_removes_dead_calls_and_weights_but_no_input() -> None:
    def both(x: Any, y: Any, w: Any) -> Any:
        return aten.relu.default(x), aten.linear.default(x, w)

    program = example(both, {"x": rows(8), "y": rows(8)}, {"w": random(8, 8)}).program
    output = program.output()
    output.args = (output.args[0][:1],)  # type: ignore[index]
    program.drop_unused()
    assert [node.name for node in program.inputs()] == ["x", "y"]
    assert not program.weights
    assert program.to_text().count("=") == 3


def test_run_observes_and_replaces_calls() -> None:
    made = example(lambda x: aten.neg.default(aten.relu.default(x)), {"x": rows(8)})
    seen = []
    (result,) = made.program.run(
        made.inputs,
        made.reader.tensors.__getitem__,
        calls={aten.relu.default: torch.abs},
        observe=lambda node, value: seen.append((node.name, value)),
    )
    torch.testing.assert_close(result, -made.inputs["x"].abs())
    assert [name for name, _ in seen] == ["relu_default", "neg_default"]
    torch.testing.assert_close(seen[0][1], made.inputs["x"].abs())


@pytest.mark.parametrize(
    "size",
    ["().__class__", "__import__('os').getpid()", "s9", "s0 ** 9", "'a' * 9", "s0.node", "max(1, 2)", "1.5", "True"],
)
def test_a_size_of_a_file_is_arithmetic_and_nothing_else(size: str) -> None:
    made = example(graph, {"x": rows(8), "y": rows(8)}, {"w": random(8, 8)})
    data = to_json(made.program)
    (symbol,) = data["symbols"]
    data["nodes"][0]["val"]["shape"][0] = size.replace("s0", symbol)
    with pytest.raises(ValueError, match="a size may hold s"):
        from_json(data)
