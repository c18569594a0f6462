"""Products on tiles: the bits that the manual's pseudocode gives, whatever the number of rows, and what is compiled."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from cpp_kernels import EMULATED, ISAS, Kernels, assert_near, build_emulated, group_panels, moe_experts, packed, part_of
from experts import SCHEMES, as_rows, experts_of
from lowered import Compiled, Shape, as_torch, make_plan
from numpy.typing import NDArray
from torch import Tensor

from inferc.codegen.cpp import build as cpp_build
from inferc.codegen.cpp.build import Unit, build
from inferc.codegen.cpp.unit import HEADERS
from inferc.config import EngineConfig
from inferc.ir.ops import quantize as reference
from inferc.ir.reference import new_kv_caches
from inferc.runtime.runners.cpu.runner import CpuRunner
from inferc.runtime.step.plan import StepPlan

ops = torch.ops.inferc
BF16, F32 = torch.bfloat16, torch.float32
NO_TILES = "this machine runs no AMX: amx is compiled, and what runs is its code with emulated tiles"
Floats = NDArray[np.float32]

pytestmark = pytest.mark.skipif("avx512" not in ISAS, reason="the rest of the amx code needs AVX-512")


def opened(isa: str) -> Iterator[Kernels]:
    made = Kernels(isa)
    yield made
    made.close()


@pytest.fixture(
    scope="module", params=[EMULATED, pytest.param("amx", marks=pytest.mark.skipif("amx" not in ISAS, reason=NO_TILES))]
)
def tiles(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    yield from opened(request.param)


@pytest.fixture(scope="module")
def vectors() -> Iterator[Kernels]:
    yield from opened("avx512")


def flushed(x: Floats) -> Floats:
    """Denormals are zero."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def by_the_manual(x: Tensor, weight: Tensor) -> Floats:
    """Return x [rows, k] @ weight.T [k, n] as TDPBF16PS adds it up, 32 of k at a time, for inputs in bfloat16.

    A product of two bfloat16 is a float32, so that to round the sum is to round a fused multiply-add.
    """
    (rows, k), n = x.shape, weight.shape[0]
    left, right = (
        flushed(torch.nn.functional.pad(value.float(), (0, -k % 32)).numpy()).astype(np.float32)
        for value in (x, weight)
    )
    total = np.zeros((rows, n), np.float32)
    for tile in range(0, left.shape[1], 32):
        sums = [np.zeros((rows, n), np.float32), np.zeros((rows, n), np.float32)]
        for i in range(tile, tile + 32):
            sums[i % 2] = flushed(sums[i % 2] + left[:, i, None] * right[None, :, i])
        total = flushed(total + flushed(sums[0] + sums[1]))
    return total


def linear(kernels: Kernels, x: Tensor, weight: Tensor, n: int) -> Tensor:
    """Return the product with a packed weight, in float32."""
    (rows, k), out = x.shape, torch.full((x.shape[0], n), float("nan"))
    kernels.run("test_linear", BF16, x, x.stride(0), rows, weight, n, k, None, out, n, True)
    return out


@pytest.mark.parametrize("sizes", [(1, 16, 32), (2, 3, 1), (5, 40, 33), (16, 64, 96), (33, 70, 130), (48, 17, 2148)])
def test_sums_have_the_bits_of_the_manual(tiles: Kernels, sizes: tuple[int, int, int]) -> None:
    rows, n, k = sizes
    x, weight = torch.randn(rows, k + 3).to(BF16)[:, 1 : 1 + k], torch.randn(n, k).to(BF16)
    found = linear(tiles, x, packed(weight), n).numpy()
    np.testing.assert_array_equal(found.view(np.int32), by_the_manual(x, weight).view(np.int32))


def test_denormals_are_zero(tiles: Kernels) -> None:
    x, weight = torch.full((3, 64), 2.0**-70, dtype=BF16), torch.full((16, 64), 2.0**-70, dtype=BF16)
    weight[0] = 1.0  # the others' products are too small
    x[2] = 2.0**-130  # and this row is
    weight[1] = 2.0**100
    found = linear(tiles, x, packed(weight), 16)
    np.testing.assert_array_equal(found.numpy(), by_the_manual(x, weight))
    assert found[0, 0] == 64 * 2.0**-70 and found[0, 1] == 64 * 2.0**30
    assert not found[:, 2:].any() and not found[2].any()


def test_any_number_of_rows_has_the_same_bits(tiles: Kernels) -> None:
    """Weights in int8 are among the cases: k ends within their four, a pair and a tile."""
    n, k = 70, 1059
    x, weight = torch.randn(70, k).to(BF16), torch.randint(-127, 128, (n, k), dtype=torch.int8)
    bits = packed(weight.to(BF16) / 64)
    ones, integers = torch.ones(n), packed(weight)
    whole, alone = linear(tiles, x, bits, n), torch.cat([linear(tiles, row[None], bits, n) for row in x])
    assert_near(whole, x.float() @ (weight.float() / 64).T)
    assert torch.equal(whole, alone)
    for rows in range(1, 70):
        assert torch.equal(linear(tiles, x[70 - rows :], bits, n), whole[70 - rows :])
        if rows % 3 and rows > 4:
            continue
        out = torch.full((rows, n), float("nan"))
        tiles.run("test_wide_int8", BF16, x, None, rows, integers, n, k, ones, None, out)
        assert torch.equal(out, 64 * whole[:rows])


def test_integers_have_the_bits_of_avx512(tiles: Kernels, vectors: Kernels) -> None:
    """The sums and the arithmetic after them are the same, below and above the number of rows at which tiles begin."""
    for n, k in ((70, 131), (17, 8195)):
        x, x_scale = ops.quantize_rows(torch.randn(70, k))
        weight, scale = torch.randint(-127, 128, (n, k), dtype=torch.int8), torch.rand(n) / k
        stored = packed(weight)
        for rows in (*range(1, 70), 70) if k < 1000 else (12, 13, 70):
            out = [torch.full((rows, n), float("nan")) for _ in range(2)]
            for kernels, each in zip((tiles, vectors), out, strict=True):
                kernels.run("test_wide_int8", BF16, x, x_scale, rows, stored, n, k, scale, None, each)
            assert torch.equal(*out)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_four_bits_have_the_bits_of_avx512(tiles: Kernels, vectors: Kernels, group: int) -> None:
    for n, k in ((70, 131), (20, 1100)):
        x, x_scale = ops.quantize_rows(torch.randn(70, k))
        weight, of_groups, scale = reference.quantize_int4(torch.randn(n, k), group)
        stored = (packed(weight), group_panels(of_groups), scale)
        for rows in (*range(1, 70), 70) if k < 1000 else (12, 13, 70):
            out = [torch.full((rows, n), float("nan"), dtype=BF16) for _ in range(2)]
            for kernels, each in zip((tiles, vectors), out, strict=True):
                kernels.run("test_linear_w4a8", BF16, x, k, x_scale, rows, *stored, n, k, group, None, None, each)
            assert torch.equal(*out)


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if scheme != "int8"])
def test_experts_have_the_bits_of_avx512(tiles: Kernels, vectors: Kernels, scheme: str) -> None:
    """Experts in integers have more, and fewer, rows than tiles begin at."""
    for rows, experts, hidden, inter in ((60, 3, 200, 48), (200, 4, 131, 160)):
        torch.manual_seed(rows)
        weights = experts_of(scheme, BF16, experts, hidden, inter, biased=True)
        ids, shares = ops.moe_routing(torch.randn(rows, experts), None, 2, True)
        given = {**as_rows(scheme, torch.randn(rows, hidden).to(BF16)), "expert_ids": ids, "expert_weights": shares}
        for count in (1, 7, 20, rows):
            some = part_of(given, 0, count)
            assert torch.equal(*(moe_experts(kernels, **some, **weights) for kernels in (tiles, vectors)))


@pytest.mark.parametrize("scheme", [None, "int8"])
def test_experts_on_tiles_do_not_depend_on_other_rows(tiles: Kernels, scheme: str | None) -> None:
    """Rows in bfloat16, whose sums tiles round in their own way: near the reference, a row's bits its own."""
    rows, experts, hidden, inter = 90, 3, 131, 48
    weights = experts_of(scheme, BF16, experts, hidden, inter)
    ids, shares = ops.moe_routing(torch.randn(rows, experts), None, 2, True)
    given = {"x": torch.randn(rows, hidden).to(BF16), "expert_ids": ids, "expert_weights": shares}
    whole = moe_experts(tiles, **given, **weights)
    assert_near(whole, ops.moe_experts(**given, **weights), factor=2.0)
    for first, end in ((0, 1), (4, 9), (30, 62)):
        assert torch.equal(moe_experts(tiles, **part_of(given, first, end), **weights), whole[first:end])


# ------------------------------------------------------------------------------------------ a whole step


@pytest.fixture(
    scope="module",
    params=[pytest.param(False, id="plain"), pytest.param(True, id="int8-kv", marks=pytest.mark.slow)],
)
def compiled(request: pytest.FixtureRequest) -> Compiled:
    made = Compiled(Shape(BF16, tied=True, qk_norm=True, bias=True, experts=4, int8_kv=request.param), ())
    made.libraries = {"avx512": build_emulated([Unit(made.unit.whole)], made.unit.headers)}
    made.isas = ("avx512",)
    return made


def logits_of(compiled: Compiled, num_threads: int, *plans: StepPlan) -> list[Tensor]:
    config = EngineConfig(
        num_threads=num_threads,
        max_num_seqs=4,
        max_num_batched_tokens=160,
        kv_memory_bytes=64 * compiled.block_size * compiled.kv_bytes_per_token,
    )
    runner, seen = CpuRunner(compiled, config, poison=True), list[Tensor]()
    try:
        runner.set_observer(lambda entry, _, value: seen.append(as_torch(value)) if entry.name == "logits" else None)
        for plan in plans:
            runner.score(plan, np.zeros(len(plan.logits_rows), np.int32))
    finally:
        runner.close()
    return seen


def test_a_step_on_tiles(compiled: Compiled) -> None:
    """Against the references; whole, in chunks, token by token and on other threads the same bits."""
    ids = [int(token) for token in np.random.default_rng(3).integers(0, 90, 61)]
    plan = make_plan([(0, ids, 0)], all_rows=True)
    (whole,) = logits_of(compiled, 2, plan)
    _, expected = compiled.reference(plan, new_kv_caches(compiled.lowered, 64)[0])
    assert (whole - expected).abs().median() < 0.02 * expected.abs().max()
    for chunk, threads in ((1, 1), (7, 2), (33, 3)):
        plans = [make_plan([(1, ids[at : at + chunk], at)], all_rows=True) for at in range(0, len(ids), chunk)]
        assert torch.equal(torch.cat(logits_of(compiled, threads, *plans)), whole)


# ------------------------------------------------------------------------------------------ what is compiled

SOURCE = """
#include "attention.h"
#include "int4.h"
namespace inferc {
template void linear(Team&, Rows<const bf16>, i64, Panels<bf16>, const bf16*, Rows<bf16>);
template void linear_int8(Team&, Rows<const bf16>, i64, Panels<i8>, const float*, const bf16*, Written<bf16>);
template void linear_w8a8(Team&, Rows<const i8>, Rows<const float>, i64, Panels<i8>, const float*, const bf16*,
                          Written<bf16>);
template void linear_w4a8(Team&, Rows<const i8>, Rows<const float>, i64, Int4Panels, const float*, const bf16*,
                          Written<bf16>);
template void paged_attention(Team&, const Attention<bf16>&);
template void paged_attention(Team&, const Attention<bf16, Cache<i8>>&);
}
"""


Functions = dict[str, list[tuple[int, str, str]]]
"""(address, instruction, operands) of every function of a library, by mangled name."""


@lru_cache(maxsize=2)
def disassembled(isa: str) -> Functions:
    """Products as they are compiled for `isa` in an artifact, whatever flags the other tests are compiled with."""
    if shutil.which("objdump") is None:
        pytest.skip("objdump is not on PATH")
    if any("-fsanitize" in flag for flag in cpp_build.FLAGS):
        pytest.skip("not the code that an artifact holds")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("INFERC_CXXFLAGS", raising=False)
        library = build([Unit(SOURCE)], HEADERS, (isa,))[isa]
    text = subprocess.run(["objdump", "-d", "--no-show-raw-insn", library], capture_output=True, text=True, check=True)
    found: Functions = {}
    for line in text.stdout.splitlines():
        if start := re.fullmatch(r"[0-9a-f]+ <(.*)>:", line):
            lines = found.setdefault(start[1], [])
        elif instruction := re.match(r" +([0-9a-f]+):\t(\S+) *(.*)", line):
            lines.append((int(instruction[1], 16), instruction[2], instruction[3]))
    return found


def innermost_loop(lines: list[tuple[int, str, str]], instruction: str) -> Counter[str]:
    """Return how often each instruction stands in the smallest loop that holds `instruction`."""
    loops = []
    for address, name, operands in lines:
        target = int(operands.split()[0], 16) if name.startswith("j") and not operands.startswith("*") else address
        body = Counter(what for at, what, _ in lines if target <= at <= address)
        if target < address and instruction in body:
            loops.append(body)
    return min(loops, key=lambda body: body.total())


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dot"), [("NS_4bf16E", "tdpbf16ps"), ("a", "tdpbssd")], ids=["bf16", "int8"])
def test_what_the_inner_loop_is_made_of(kind: str, dot: str) -> None:
    """The loop of 32 rows by two panels has one tile load per product, and else only prefetches and pointer moves."""
    functions = disassembled("amx")
    mangled = rf"_ZN6inferc14multiply_tilesI{kind}Li2ELi2ELNS_7StreamsE1EE[^.]*$"
    (name,) = (name for name in functions if re.match(mangled, name))
    loop = innermost_loop(functions[name], dot)
    assert loop[dot] == 4 and loop["tileloadd"] == 2 and loop["tileloaddt1"] == 2
    assert loop["tilestored"] == 0 and not any(re.match("v|mov", what) for what in loop)
    others = {what: count for what, count in loop.items() if what not in (dot, "prefetcht1") and "load" not in what}
    assert sum(others.values()) <= 20, others  # eight additions, the rest is about what is fetched


@pytest.mark.slow
def test_what_four_bits_cost_on_tiles() -> None:
    """A multiply, a subtraction and a store for each 64 bytes that are made of them; sums stay in tiles."""
    functions = disassembled("amx")
    (name,) = (name for name in functions if re.match(r"_ZN6inferc11int4_streamILi2E[^.]*$", name))
    assert innermost_loop(functions[name], "tdpbssd")["tilestored"] == 0
    all_of_it = Counter(what for _, what, _ in functions[name])
    assert all_of_it["tdpbssd"] == all_of_it["tileloadd"] == 4 and all_of_it["idiv"] <= 1  # where a panel lies
    made, places = all_of_it["vpmullw"], 2  # the first tile is made in front of the loop
    assert made and made == 2 * all_of_it["vpternlogd"]
    assert all_of_it["vpsubb"] == made + 2 * places  # and two for a group's scale
    assert all_of_it["vmovdqu64"] == made + made // 4  # and the loads


@pytest.mark.slow
def test_only_the_library_for_amx_has_tiles() -> None:
    def used(isa: str) -> set[str]:
        return {
            what
            for lines in disassembled(isa).values()
            for _, what, _ in lines
            if what.startswith(("tile", "tdp", "ldtile"))
        }

    dots = {"tdpbf16ps", "tdpbssd"}
    assert used("amx") == dots | {"ldtilecfg", "tileloadd", "tileloaddt1", "tilerelease", "tilestored", "tilezero"}
    assert not used("avx512")


# ------------------------------------------------------------------------------------------ the emulation's own checks

FAULTS = """
#include "amx.h"
using namespace inferc;
extern "C" __attribute__((visibility("default"))) int fault(int which) {
  alignas(64) static char data[4096];
  const bf16* type = nullptr;
  if (which == 1) amx::load<0>(data, 64);
  shape_tiles(3, 0);
  if (which == 2) amx::load<2>(data, 64);  // a second tile of rows
  TileConfig config = {};
  config.palette = 1;
  config.rows[0] = 17, config.bytes[0] = 64;
  if (which == 3) amx::configure(config);
  config.rows[0] = 16, config.bytes[0] = 65;
  if (which == 4) amx::configure(config);
  config.rows[0] = 16, config.bytes[0] = 0;
  if (which == 5) amx::configure(config);
  for (int t = 0; t < 8; t += 2) config.rows[t] = 16, config.bytes[t] = 64;
  config.rows[6] = 8;
  amx::configure(config);
  amx::zero<0>(), amx::zero<4>(), amx::zero<6>();
  if (which == 6) amx::dot<0, 4, 6>(type);
  config.rows[6] = 16, config.rows[4] = 15;
  amx::configure(config);
  if (which == 7) amx::dot<0, 4, 6>(type);
  amx::release();
  if (which == 8) amx::zero<0>();
  return 0;
}
"""
MESSAGES = (
    "no configuration",
    "the tile is not configured",
    "at most 16 rows of 64 bytes",
    "at most 16 rows of 64 bytes",
    "rows without bytes",
    "differ in k",
    "differ in height",
    "no configuration",
)


def test_what_is_a_fault_on_the_processor_ends_the_emulation() -> None:
    library: Path = build_emulated([Unit(FAULTS)], HEADERS)
    call = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).fault(int(sys.argv[2])))"
    for which, message in enumerate(("", *MESSAGES)):
        done = subprocess.run(
            [sys.executable, "-c", call, library, str(which)], check=False, capture_output=True, text=True
        )
        assert (done.returncode == 0) == (which == 0)
        assert message in done.stderr
