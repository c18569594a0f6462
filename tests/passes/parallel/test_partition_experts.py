"""Experts placed on ranks: what each rank gets, where tokens go, and that together the ranks are the whole."""

import textwrap
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import example, random
from ranks import Model, random_module, run, weight_bytes

from inferc.backends.partition import Ranks
from inferc.cost.expert_loads import ExpertLoads
from inferc.errors import ConfigError, UnsupportedError
from inferc.ir.ops import expert_combine, expert_dispatch, run_ranks
from inferc.ir.program import Program
from inferc.ir.weights import read_whole
from inferc.passes.parallel.expert_placement import Placement, balanced, contiguous, placements
from inferc.passes.parallel.partition_experts import partition_experts
from inferc.passes.verify import verify

aten, inferc = torch.ops.aten, torch.ops.inferc
PROMPTS = [torch.randint(0, 96, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (21, 6)]
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 1}
LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "deepseek_v3": {**ROUTED, **LATENT},
}
LOADS = [90, 5, 40, 5, 3, 30, 2, 1]


@cache
def model(name: str) -> Model:
    return Model(random_module(name, **MODELS[name]))


@cache
def expected(name: str) -> list[torch.Tensor]:
    return run(model(name).whole(), model(name).reader, PROMPTS, 16)


def assert_equal(name: str, ranks: Ranks, chunk: int = 16) -> None:
    made = model(name).ranks(ranks)
    for got, want in zip(run(made, model(name).reader, PROMPTS, chunk), expected(name), strict=True):
        assert float((got - want).abs().max() / want.abs().max()) < 1e-5


def moe(positions: Any, x: Any, router: Any, gate_up: Any, down: Any) -> Any:
    chosen = inferc.moe_routing.default(aten.linear.default(x, router), None, 2, True)
    return inferc.moe_experts.default(x, chosen[0], chosen[1], gate_up, down)


WEIGHTS = {"router": random(4, 6), "gate_up": random(4, 8, 6, seed=1), "down": random(4, 6, 4, seed=2)}
INPUTS = {"positions": torch.arange(5), "x": random(5, 6)}


def test_exchanges_tokens_around_a_ranks_own_experts() -> None:
    made = example(moe, INPUTS, WEIGHTS)
    placed: dict[int, Placement] = {0: ((0, 1), (1,), (0,), (1,))}
    programs = partition_experts(made.program, 2, placed)
    golden = """
        %positions: int64[s0] = input
        %x: float32[s0, 6] = input
        %0: float32[s0, 4] = aten.linear(%x, @router)
        %1: (int32[s0, 2], float32[s0, 2]) = inferc.moe_routing(%0, None, 2, True)
        %2: int32[s0, 2] = getitem(%1, 0)
        %3: float32[s0, 2] = getitem(%1, 1)
        %4: (float32[s0, 6], int32[s0, 2], float32[s0, 2]) = inferc.expert_dispatch(%x, %2, %3, %positions, \
@moe_experts_default.placement, 'ep', 1, 2)
        %5: float32[s0, 6] = getitem(%4, 0)
        %6: int32[s0, 2] = getitem(%4, 1)
        %7: float32[s0, 2] = getitem(%4, 2)
        %8: float32[s0, 6] = inferc.moe_experts(%5, %6, %7, @gate_up.ep1, @down.ep1, None, None, 'silu', 1.0, 0.0, \
False, None, None, None, None, None, None)
        %9: float32[s0, 6] = inferc.expert_combine(%8, %2, %positions, @moe_experts_default.placement, 'ep', 1, 2)
        return (%9)
    """
    for program in programs:
        verify(program)
    assert programs[1].to_text() == textwrap.dedent(golden).lstrip("\n"), programs[1].to_text()
    assert str(programs[1].weights["down.ep1"]) == "concat(down[0:2@0], down[3:4@0], dim=0)"

    def rank(program: Program) -> torch.Tensor:
        result: torch.Tensor
        (result,) = program.run(made.inputs, lambda name: read_whole(program.weights[name], made.reader))
        return result

    for results in run_ranks("ep", [partial(rank, own) for own in programs]):
        torch.testing.assert_close(results, made.run()[0])


def test_only_tokens_of_a_ranks_experts_arrive() -> None:
    """Three tokens of rank 0, two of rank 1; expert 0 on rank 0, expert 1 on rank 1: the counts are uneven."""
    x, ids = random(5, 3), torch.tensor([[0], [0], [1], [0], [0]], dtype=torch.int32)
    how = (torch.arange(5), torch.tensor([[0], [1]], dtype=torch.int32), "ep")

    def rank(index: int) -> tuple[torch.Tensor, ...]:
        rows, local, weights = expert_dispatch(x, ids, torch.ones(5, 1), *how, index, 2)
        return rows, local, weights, expert_combine(rows * (index + 1), ids, *how, index, 2)

    first, second = run_ranks("ep", [lambda: rank(0), lambda: rank(1)])
    assert torch.equal(first[0], torch.cat((x[[0, 1, 3, 4]], torch.zeros(1, 3))))
    assert first[1].flatten().tolist() == [0, 0, 0, 0, -1]
    assert torch.equal(second[0][0], x[2])
    assert second[1].flatten().tolist() == [0, -1, -1, -1, -1]
    for _, _, _, result in (first, second):
        assert torch.equal(result, x * torch.tensor([[1.0], [1], [2], [1], [1]]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ep"),
    [
        pytest.param(name, ep, marks=() if name == "mixtral" or ep == 4 else pytest.mark.slow)
        for name in MODELS
        for ep in (2, 4, 8)
    ],
)
def test_ranks_together_are_the_whole(name: str, ep: int) -> None:
    assert_equal(name, Ranks(ep=ep))


@pytest.mark.quick("mixtral")
@pytest.mark.parametrize("name", MODELS)
def test_sums_over_the_ranks_are_the_whole(name: str) -> None:
    assert_equal(name, Ranks(ep=4, exchange="all_reduce"))


@pytest.mark.slow
def test_redundant_experts_are_the_whole_in_any_chunks() -> None:
    placed = dict.fromkeys(range(2), balanced(LOADS, 4, 4))
    assert_equal("mixtral", Ranks(ep=4, placements=placed), chunk=5)


@pytest.mark.slow
def test_chunks_do_not_move_a_bit() -> None:
    """A token's replica depends on its position alone."""
    made = model("mixtral").ranks(Ranks(ep=4, placements=dict.fromkeys(range(2), balanced(LOADS, 4, 4))))
    whole, chunked = (run(made, model("mixtral").reader, PROMPTS[1:], size) for size in (16, 3))
    torch.testing.assert_close(chunked, whole, rtol=1e-6, atol=1e-6)


def test_collectives_and_bytes_of_a_rank() -> None:
    whole = weight_bytes(model("mixtral").whole()[0].program)
    experts = 2 * 8 * 3 * 48 * 32 * 4
    for each in model("mixtral").ranks(Ranks(ep=4)):
        for target in (inferc.expert_dispatch.default, inferc.expert_combine.default):
            assert len(each.program.graph.find_nodes(op="call_function", target=target)) == 2
        tables = 2 * 8 * 4
        assert weight_bytes(each.program) == whole - experts + experts // 4 + tables


@pytest.mark.slow
def test_stages_of_expert_ranks() -> None:
    made = model("mixtral").ranks(Ranks(pp=2, ep=2))
    assert [(each.ep_rank, each.pp_stage) for each in made] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert_equal("mixtral", Ranks(pp=2, ep=2))


# ----------------------------------------------------------------------------------------------- placement


def rank_loads(placement: Placement, loads: Sequence[float], ep: int) -> list[float]:
    """Return the number of tokens that each rank computes if replicas share their expert's tokens evenly."""
    total = [0.0] * ep
    for ranks, load in zip(placement, loads, strict=True):
        for rank in ranks:
            total[rank] += load / len(ranks)
    return total


def test_placement_by_load_lowers_the_largest_load() -> None:
    even = max(rank_loads(contiguous(8, 4), LOADS, 4))
    once = max(rank_loads(balanced(LOADS, 4), LOADS, 4))
    redundant = balanced(LOADS, 4, 4)
    assert (even, once) == (95, 91)
    assert max(rank_loads(redundant, LOADS, 4)) == 53.5
    assert len(redundant[0]) > 1
    assert sum(map(len, redundant)) == 12
    assert sum(rank_loads(redundant, LOADS, 4)) == pytest.approx(sum(LOADS))


@pytest.mark.parametrize("loads", [[0] * 8, [1] * 8, [100, *[0] * 7]])
@pytest.mark.parametrize("num_redundant", [0, 3, 8, 24])
def test_every_rank_holds_experts_and_none_twice(loads: list[float], num_redundant: int) -> None:
    placement = balanced(loads, 4, num_redundant)
    assert sum(map(len, placement)) == 8 + num_redundant
    assert all(len(set(ranks)) == len(ranks) for ranks in placement)
    assert {rank for ranks in placement for rank in ranks} == {0, 1, 2, 3}


@pytest.mark.slow
def test_a_profile_is_saved_and_read(tmp_path: Path) -> None:
    loads = ExpertLoads()
    loads.add(1, [3, 0, 2, 9, 0, 0, 1, 1])
    loads.add(1, [0, 1, 0, 1, 0, 0, 0, 0])
    loads.save(tmp_path / "loads.json")
    assert ExpertLoads.load(tmp_path / "loads.json") == loads == ExpertLoads({1: [3, 1, 2, 10, 0, 0, 1, 1]})
    assert [path.name for path in tmp_path.iterdir()] == ["loads.json"]
    assert_equal("deepseek_v3", Ranks(ep=4, placements=placements(loads, 4, 4)))
    with pytest.raises(ConfigError, match="cannot write"):
        loads.save(tmp_path / "no" / "loads.json")


# ------------------------------------------------------------------------------------------------ refusals


def test_more_ranks_than_experts() -> None:
    with pytest.raises(ConfigError, match="--ep 5: a layer has 4 experts; use --ep from 1 to 4"):
        partition_experts(example(moe, INPUTS, WEIGHTS).program, 5)


def test_a_program_without_experts() -> None:
    def dense(x: Any, router: Any) -> Any:
        return aten.linear.default(x, router)

    with pytest.raises(UnsupportedError, match="has no experts to place"):
        partition_experts(example(dense, {"x": random(5, 6)}, {"router": random(4, 6)}).program, 2)


@pytest.mark.parametrize(
    ("placement", "why"),
    [
        (((0,), (1,)), "names 2 experts; expected 4"),
        (((0,), (1,), (), (1,)), "an expert on no rank"),
        (((0,), (1, 1), (0,), (1,)), "twice on one"),
        (((0,), (2,), (0,), (1,)), "outside of 0 to 1"),
        (((0,), (0,), (0,), (0,)), "leaves a rank of 2 without experts"),
    ],
)
def test_placements_that_do_not_fit(placement: Placement, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        partition_experts(example(moe, INPUTS, WEIGHTS).program, 2, {0: placement})


@pytest.mark.parametrize(
    "text", ["{}", "[]", "no json", '{"expert_loads": {"0": [-1]}}', '{"expert_loads": {"x": [1]}}']
)
def test_files_that_are_no_load_profile(text: str, tmp_path: Path) -> None:
    (tmp_path / "loads.json").write_text(text)
    with pytest.raises(ConfigError, match=r"loads\.json: (no load profile|a load is negative)"):
        ExpertLoads.load(tmp_path / "loads.json")


def test_a_file_of_bytes_is_no_load_profile(tmp_path: Path) -> None:
    (tmp_path / "loads.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"loads\.json: not UTF-8 text"):
        ExpertLoads.load(tmp_path / "loads.json")
