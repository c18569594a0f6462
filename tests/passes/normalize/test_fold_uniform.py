from typing import Any

import pytest
import torch
from graphs import TOKENS, Example, example, random
from torch import ops

from inferc.ir import weights as weight_lib
from inferc.passes.normalize.fold_uniform import FoldUniform

aten = ops.aten
IDS = {"token_ids": torch.tensor([[3, 1, 4, 1, 5]]), "positions": torch.arange(TOKENS)[None]}
TABLES = {"words": random(7, 4), "types": random(2, 4, seed=1)}


def with_types(function: Any, types: torch.Tensor) -> Example:
    """An example whose weight `kinds` is a constant of the model's code."""
    made = example(function, IDS, {**TABLES, "kinds": types})
    made.program.weights["kinds"] = weight_lib.constant(types)
    return made


def typed(token_ids: Any, positions: Any, words: Any, types: Any, kinds: Any) -> Any:
    found = aten.gather.default(aten.expand.default(kinds, [1, -1]), 1, positions)
    return aten.add.Tensor(aten.embedding.default(words, token_ids), aten.embedding.default(types, found))


def test_a_type_that_all_tokens_have_is_a_row_of_its_table() -> None:
    golden = """
        %token_ids: int64[1, s0] = input
        %positions: int64[1, s0] = input
        %0: float32[1, s0, 4] = aten.embedding(@words, %token_ids)
        %1: float32[1, s0, 4] = aten.add.Tensor(%0, @types.1)
        return (%1)
    """
    with_types(typed, torch.ones(1, 9, dtype=torch.long)).check(FoldUniform(), 1, golden)


def test_a_type_that_is_made_with_the_tokens() -> None:
    def graph(token_ids: Any, positions: Any, words: Any, types: Any, kinds: Any) -> Any:
        wide = aten.embedding.default(words, token_ids)
        return aten.mul.Tensor(wide, aten.embedding.default(types, aten.zeros_like.default(token_ids)))

    golden = """
        %token_ids: int64[1, s0] = input
        %positions: int64[1, s0] = input
        %0: float32[1, s0, 4] = aten.embedding(@words, %token_ids)
        %1: float32[1, s0, 4] = aten.mul.Tensor(%0, @types.0)
        return (%1)
    """
    example(graph, IDS, TABLES | {"kinds": random(1)}).check(FoldUniform(), 1, golden)


@pytest.mark.parametrize("kinds", [[[0, 1, 0, 1, 0, 1, 0]], [[0, 0, 0, 0, 0, 0, 1]]])
def test_types_that_differ_are_looked_up(kinds: list[list[int]]) -> None:
    with_types(typed, torch.tensor(kinds)).check_untouched(FoldUniform())


def test_a_row_that_is_read_otherwise_stays_one_for_each_token() -> None:
    def graph(token_ids: Any, positions: Any, words: Any, types: Any, kinds: Any) -> Any:
        rows = aten.embedding.default(types, aten.zeros_like.default(token_ids))
        return aten.cat.default([aten.embedding.default(words, token_ids), rows], -1)

    example(graph, IDS, TABLES | {"kinds": random(1)}).check_untouched(FoldUniform())
