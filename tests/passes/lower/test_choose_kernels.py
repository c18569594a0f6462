from typing import Any

import pytest
import torch
from graphs import example, random
from kernel_tables import choose_for
from torch import ops

from inferc.errors import UnsupportedError
from inferc.passes.verify import verify

aten, inferc = ops.aten, ops.inferc
IDS = {"token_ids": torch.tensor([3, 1, 4, 1, 5], dtype=torch.int32)}


def model(token_ids: Any, embed: Any, up: Any, head: Any) -> Any:
    x = aten.embedding.default(embed, token_ids)
    x = aten.linear.default(x, up)
    return inferc.lm_head.default(aten.slice.Tensor(x, -1, 0, 8), head, None)


def tied(token_ids: Any, embed: Any) -> Any:
    return inferc.lm_head.default(aten.embedding.default(embed, token_ids), embed, None)


@pytest.mark.parametrize(("dtype", "layout"), [(torch.float32, "panel16_k1"), (torch.bfloat16, "panel16_k2")])
def test_the_cpu_reads_packed_weights(dtype: torch.dtype, layout: str) -> None:
    weights = {"embed": random(7, 8), "up": random(16, 8), "head": random(7, 8)}
    made = example(model, IDS, {name: value.to(dtype) for name, value in weights.items()})
    name = str(dtype).removeprefix("torch.")
    golden = f"""
        %token_ids: int32[s0] = input
        %0: {name}[s0, 8] = aten.embedding(@embed, %token_ids)  # cpp.embedding.{name}
        %1: {name}[s0, 16] = aten.linear(%0, @up)  # cpp.linear.{name}
        %2: {name}[s0, 8] = aten.slice.Tensor(%1, -1, 0, 8)
        %3: float32[s0, 7] = inferc.lm_head(%2, @head, None)  # cpp.lm_head.{name}
        return (%3)
    """
    made.check(choose_for("cpu"), 3, golden)
    assert {key: weight.layout for key, weight in made.program.weights.items()} == {
        "embed": "",
        "up": layout,
        "head": layout,
    }
    assert choose_for("cpu")(made.program) == 0


def test_a_tied_embedding_is_stored_once_and_packed() -> None:
    made = example(tied, IDS, {"embed": random(7, 8)})
    assert choose_for("cpu")(made.program) == 2
    verify(made.program)
    assert made.program.weights["embed"].layout == "panel16_k1"
    assert "cpp.embedding_panel.float32" in made.program.to_text()


def test_the_reference_packs_nothing() -> None:
    made = example(tied, IDS, {"embed": random(7, 8)})
    assert choose_for("reference")(made.program) == 2
    assert made.program.weights["embed"].op == "source"


def test_readers_that_disagree_on_a_layout_are_refused() -> None:
    def graph(token_ids: Any, w: Any) -> Any:
        x = aten.embedding.default(w, token_ids)
        return aten.linear.default(x, w, aten.slice.Tensor(w, 0, 0, 1)), inferc.rms_norm.default(x, w, 1e-5)

    made = example(graph, IDS, {"w": random(8, 8)})
    with pytest.raises(UnsupportedError, match="a weight is stored once"):
        choose_for("cpu")(made.program)


def test_an_op_without_a_kernel_is_named() -> None:
    made = example(
        lambda token_ids, w: aten.relu.default(aten.embedding.default(w, token_ids)), IDS, {"w": random(8, 8)}
    )
    with pytest.raises(
        UnsupportedError, match=r"inferc cannot run aten.relu yet \(node relu_default\).* on target cpu"
    ):
        choose_for("cpu")(made.program)


def test_all_that_cannot_run_is_listed_each_kind_once() -> None:
    def graph(token_ids: Any, w: Any) -> Any:
        x = aten.relu.default(aten.relu.default(aten.embedding.default(w, token_ids)))
        return aten.sort.default(x)[0]

    made = example(graph, IDS, {"w": random(8, 8)})
    message = (
        r"inferc cannot run aten.relu yet \(node relu_default\): .* on target onnx, and 1 more like it;"
        r" inferc cannot run aten.sort yet \(node sort_default\): .* on target onnx$"
    )
    with pytest.raises(UnsupportedError, match=message):
        choose_for("onnx")(made.program)
