"""The cutting of products for the caches: what the model of cost chooses, and that no cut changes a bit."""

from __future__ import annotations

from dataclasses import astuple

import pytest
import torch
from cpp_kernels import EMULATED, Kernels, assert_near, nan, packed
from experts import quantized

from inferc.codegen.cpp.blocking import (
    ANY_ROWS,
    CORES,
    ROWS,
    Blocking,
    Product,
    candidates,
    choices,
    choose,
    core_of,
    cycles,
)
from inferc.codegen.cpp.build import ISA_FLAGS
from inferc.codegen.cpp.emit import ISA_CONDITIONS

ops = torch.ops.inferc
SCHEMES = ("float", "int8", "w8a8")
PRODUCTS = [
    Product(n, k, row_size, weight_bytes)
    for n, k in ((1, 1), (100, 33), (4096, 1024), (16384, 2048), (2048, 8192), (1000, 28672))
    for row_size, weight_bytes in ((4, 4), (2, 2), (2, 1), (4, 1), (1, 1), (1, 0.5))
]


def test_every_instruction_set_has_a_core_and_a_condition() -> None:
    assert set(CORES) == set(ISA_FLAGS) == set(ISA_CONDITIONS)


@pytest.mark.parametrize("isa", CORES)
def test_a_choice_is_what_costs_least_of_what_the_kernel_has_room_for(isa: str) -> None:
    for product in PRODUCTS:
        for rows in ROWS:
            core, chosen = core_of(isa, product, rows), choose(isa, product, rows)
            all_cycles = {each: cycles(core, product, rows, each) for each in candidates(core, product, rows)}
            assert all_cycles[chosen.blocking] == min(all_cycles.values())
            assert 0 < chosen.of_peak < 1
            for each in all_cycles:
                assert 0 < each.rows <= core.most_rows and each.rows % core.rows == 0
                assert each.k_bytes % 64 == 0 or each.k_bytes >= product.k * product.row_size
                assert 1 <= each.pairs <= product.most_pairs


def test_choices_go_up_to_any_number_of_rows() -> None:
    for product in PRODUCTS:
        found = choices("amx", product)
        limits = [choice.up_to for choice in found]
        assert limits == sorted(set(limits)) and limits[-1] == ANY_ROWS
        for rows in ROWS:
            first = next(choice for choice in found if rows <= choice.up_to)
            assert first.blocking == choose("amx", product, rows).blocking


def test_rows_that_overflow_the_second_level_cache_are_cut() -> None:
    """512 rows of 16 KB are 4 times a core's cache, so on tiles a block of k goes through several pairs of panels."""
    long, short = (choose("amx", Product(4096, k, 2, 2), 512).blocking for k in (8192, 512))
    assert long.pairs > 1 and long.rows * long.k_bytes < CORES["amx"].l2_bytes
    assert short.pairs == 1


def test_rows_that_are_copied_leave_room_on_the_stack() -> None:
    copied, whole = (choose("amx", Product(4096, k, 2, 2), 512).blocking for k in (20_001, 20_000))
    assert copied.rows * 20_001 * 2 <= 2 << 20 < whole.rows * 20_000 * 2


def test_a_piece_of_few_panels_has_no_more_pairs() -> None:
    assert choose("amx", Product(4096, 8192, 2, 2, most_pairs=2), 512).blocking.pairs <= 2


BLOCKINGS = (
    Blocking(32, 512),
    Blocking(64, 1024, 4),
    Blocking(96, 64, 16),
    Blocking(192, 2048, 2),
    Blocking(192, 8192),
)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("rows", "n", "k"), [(70, 40, 2500), (205, 72, 1401), (400, 200, 97)])
def test_no_cut_changes_a_bit(kernels: Kernels, dtype: torch.dtype, scheme: str, rows: int, n: int, k: int) -> None:
    x = torch.randn(rows, k).to(dtype)
    weight, scale, x_scale = torch.randn(n, k).to(dtype), None, None
    expected = x.float() @ weight.float().T
    if scheme != "float":
        weight, scale = quantized(n, k)
        expected = ops.linear_int8(x.float(), weight, scale)
    if scheme == "w8a8":
        x, x_scale = ops.quantize_rows(x)
        expected = ops.linear_w8a8(x, x_scale, weight, scale, torch.float32)
    stored, found = packed(weight), []
    for each in BLOCKINGS:
        # Fewer rows have another one, which must not be taken.
        table = torch.tensor([[rows - 1, 32, 64, 1], [ANY_ROWS, *astuple(each)]])
        out = nan(rows, n, dtype=torch.float32)
        kernels.run("test_blocked", dtype, x, x_scale, rows, stored, n, k, scale, table, out)
        found.append(out)
    assert all(torch.equal(out, found[0]) for out in found)
    assert_near(found[0], expected, factor=8.0)


@pytest.mark.parametrize(("rows", "n", "k"), [(70, 40, 16_400), (517, 72, 1401), (517, 264, 2048)])
def test_many_rows_over_long_k_have_the_bits_of_few(
    kernels: Kernels, dtype: torch.dtype, rows: int, n: int, k: int
) -> None:
    """Products are cut for this instruction set: on tiles up to 512 rows, a block of k goes through many panels."""
    x, plain = torch.randn(rows, k).to(dtype), torch.randn(n, k).to(dtype)
    weight, few, all_rows = packed(plain), nan(16, n, dtype=torch.float32), nan(rows, n, dtype=torch.float32)
    size, isa = dtype.itemsize, "amx" if kernels.isa == EMULATED else kernels.isa
    table = torch.tensor([[each.up_to, *astuple(each.blocking)] for each in choices(isa, Product(n, k, size, size))])
    first = rows - 16
    kernels.run("test_blocked", dtype, x[first:], None, 16, weight, n, k, None, table, few)
    kernels.run("test_blocked", dtype, x, None, rows, weight, n, k, None, table, all_rows)
    assert torch.equal(all_rows[first:], few)
    assert_near(all_rows, x.float() @ plain.float().T, factor=8.0)
