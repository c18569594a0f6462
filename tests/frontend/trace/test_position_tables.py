"""Look-ups by position are embeddings, and those of rope's tables are computed."""

from typing import Any

import torch
from graphs import Example, example, random
from torch import Tensor, ops

from inferc.frontend.trace.position_tables import simplify_position_tables
from inferc.ir import weights as weight_lib

aten = ops.aten
POSITIONS = torch.tensor([[0, 3, 1, 7, 39]])
INV_FREQ = 10000 ** -(torch.arange(3) / 3)
ANGLES = torch.arange(40.0)[:, None] * INV_FREQ
SINES = torch.cat((ANGLES.sin(), ANGLES.cos()), 1)


def with_table(function: Any, table: Tensor) -> Example:
    made = example(function, {"positions": POSITIONS, "x": random(1, 5, 6)}, {"table": table})
    made.program.weights["table"] = weight_lib.constant(table)
    return made


def test_a_table_that_multiplies_is_sines_and_cosines_of_positions() -> None:
    golden = """
        %positions: int64[1, s0] = input
        %x: float32[1, s0, 6] = input
        %0: float32[1, s0] = aten._to_copy(%positions, dtype=float32)
        %1: float32[1, s0, 1] = aten.unsqueeze(%0, -1)
        %2: float32[1, s0, 3] = aten.mul.Tensor(%1, @table.inv_freq)
        %3: float32[1, s0, 3] = aten.sin(%2)
        %4: float32[1, s0, 3] = aten.cos(%2)
        %5: float32[1, s0, 6] = aten.cat([%3, %4], -1)
        %6: float32[1, s0, 6] = aten.mul.Tensor(%x, %5)
        return (%6)
    """

    def indexed(positions: Any, x: Any, table: Any) -> Any:
        return aten.mul.Tensor(x, aten.index.Tensor(table, [positions]))

    made = with_table(indexed, SINES)
    made.check(simplify_position_tables, 2, golden, tolerance=1e-5)
    found = weight_lib.read_whole(made.program.weights["table.inv_freq"], made.reader)
    torch.testing.assert_close(found, INV_FREQ, rtol=2e-7, atol=0)


def test_a_gathered_table_is_an_embedding() -> None:
    golden = """
        %positions: int64[1, s0] = input
        %x: float32[1, s0, 6] = input
        %0: float32[1, s0, 6] = aten.embedding(@table, %positions)
        %1: float32[1, s0, 6] = aten.mul.Tensor(%x, %0)
        return (%1)
    """

    def gathered(positions: Any, x: Any, table: Any) -> Any:
        index = aten.repeat.default(aten.unsqueeze.default(positions, -1), [1, 1, 6])
        return aten.mul.Tensor(x, aten.gather.default(aten.repeat.default(table, [1, 1, 1]), 1, index))

    with_table(gathered, random(40, 6)).check(simplify_position_tables, 1, golden)


def test_a_table_that_is_added_stays_one() -> None:
    def added(positions: Any, x: Any, table: Any) -> Any:
        return aten.add.Tensor(x, aten.embedding.default(table, positions))

    with_table(added, SINES).check_untouched(simplify_position_tables)


def test_a_table_that_is_cast_is_read_as_it_is_stored() -> None:
    """CTRL casts all of it to the activations' dtype, for a few rows."""
    golden = """
        %positions: int64[1, s0] = input
        %x: float32[1, s0, 6] = input
        %0: float32[1, s0, 6] = aten.embedding(@table, %positions)
        %1: bfloat16[1, s0, 6] = aten._to_copy(%0, dtype=bfloat16)
        %2: bfloat16[1, s0, 6] = aten.add.Tensor(%1, 1)
        return (%2)
    """

    def indexed(positions: Any, x: Any, table: Any) -> Any:
        rows = aten.index.Tensor(aten._to_copy.default(table, dtype=torch.bfloat16), [positions])
        return aten.add.Tensor(rows, 1)

    made = with_table(indexed, random(40, 6))
    made.check(simplify_position_tables, 1, golden, tolerance=0.0)
