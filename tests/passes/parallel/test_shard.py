"""Programs spread over tensor and pipeline ranks: what each rank gets, and that together they are the whole."""

import textwrap
from functools import cache
from typing import Any

import pytest
import torch
from graphs import example, random
from oracle import export_module
from ranks import CONFIG, Model, random_module, run, weight_bytes

from inferc.backends.lower import lower
from inferc.backends.partition import Ranks, lower_ranks
from inferc.errors import ConfigError, InfercError, UnsupportedError
from inferc.ir.ops import all_gather, all_reduce, run_ranks
from inferc.ir.program import Program
from inferc.ir.weights import read_whole
from inferc.passes.parallel.shard import cuts, shard
from inferc.passes.parallel.split_columns import split_columns
from inferc.passes.parallel.split_stages import balance
from inferc.passes.verify import verify

aten, inferc = torch.ops.aten, torch.ops.inferc
PROMPTS = [torch.randint(0, 96, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (21, 6)]
LATENT = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
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
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.5}),
    "phi": ("phi", {"partial_rotary_factor": 0.5}),
    "phi3": ("phi3", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    "deepseek_v3": ("deepseek_v3", LATENT),
}
REDUCES = {"gpt_neox": 1, "phi": 1}  # a layer; parallel blocks are added before they are reduced


@cache
def model(name: str) -> Model:
    family, fields = MODELS[name]
    return Model(random_module(family, **fields))


@cache
def expected(name: str) -> list[torch.Tensor]:
    return run(model(name).whole(), model(name).reader, PROMPTS, 16)


def count(program: Program, target: Any) -> int:
    return len(program.graph.find_nodes(op="call_function", target=target))


def assert_equal(name: str, ranks: Ranks) -> None:
    made = model(name).ranks(ranks)
    for got, want in zip(run(made, model(name).reader, PROMPTS, 16), expected(name), strict=True):
        assert float((got - want).abs().max() / want.abs().max()) < 1e-5


# ------------------------------------------------------------------------------------------------ goldens


def mlp(hidden: Any, norm: Any, gate: Any, up: Any, down: Any, bias: Any, final: Any, head: Any) -> Any:
    x = inferc.rms_norm.default(hidden, norm, 1e-5)
    wide = inferc.silu_mul.default(aten.linear.default(x, gate), aten.linear.default(x, up))
    out = aten.add.Tensor(hidden, aten.linear.default(wide, down, bias))
    return aten.linear.default(inferc.rms_norm.default(out, final, 1e-5), head)


MLP = {
    "norm": random(4),
    "gate": random(6, 4, seed=1),
    "up": random(6, 4, seed=2),
    "down": random(4, 6, seed=3),
    "bias": random(4, seed=4),
    "final": random(4, seed=5),
    "head": random(7, 4, seed=6),
}


def test_splits_the_columns_of_a_block_and_of_the_head() -> None:
    made = example(mlp, {"hidden": random(5, 4)}, MLP)
    before = made.program.to_text()
    ((first, second),) = shard(made.program, tp=2)
    assert made.program.to_text() == before
    for program in (first, second):
        verify(program)
    golden = """
        %hidden: float32[s0, 4] = input
        %0: float32[s0, 4] = inferc.rms_norm(%hidden, @norm, 1e-05)
        %1: float32[s0, 3] = aten.linear(%0, @gate.tp0, None)
        %2: float32[s0, 3] = aten.linear(%0, @up.tp0, None)
        %3: float32[s0, 3] = inferc.silu_mul(%1, %2)
        %4: float32[s0, 4] = aten.linear(%3, @down.tp0, @bias)
        %5: float32[s0, 4] = inferc.all_reduce(%4, 'tp', 2)
        %6: float32[s0, 4] = aten.add.Tensor(%hidden, %5)
        %7: float32[s0, 4] = inferc.rms_norm(%6, @final, 1e-05)
        %8: float32[s0, 4] = aten.linear(%7, @head.tp0, None)
        %9: float32[s0, 7] = inferc.all_gather(%8, 'tp', 0, [4, 3], -1)
        return (%9)
    """
    assert first.to_text() == textwrap.dedent(golden).lstrip("\n"), first.to_text()
    assert "aten.linear(%3, @down.tp1, None)" in second.to_text()  # the bias is added once
    assert str(second.weights["gate.tp1"]) == "gate[3:6@0]"
    assert str(second.weights["down.tp1"]) == "down[3:6@1]"

    def rank(program: Program) -> torch.Tensor:
        logits: torch.Tensor
        (logits,) = program.run(made.inputs, lambda name: read_whole(program.weights[name], made.reader))
        return logits

    for logits in run_ranks("tp", [lambda: rank(first), lambda: rank(second)]):
        torch.testing.assert_close(logits, made.run()[0])


def test_keeps_columns_together_that_a_norm_reads_at_once() -> None:
    def normed(hidden: Any, norm: Any, gate: Any, down: Any, final: Any, head: Any) -> Any:
        inner = inferc.rms_norm.default(aten.linear.default(hidden, gate), norm, 1e-5)
        out = aten.add.Tensor(hidden, aten.linear.default(inner, down))
        return aten.linear.default(inferc.rms_norm.default(out, final, 1e-5), head)

    weights = {"norm": random(6), "gate": random(6, 4), "down": random(4, 6), "final": random(4), "head": random(8, 4)}
    ((first, _),) = shard(example(normed, {"hidden": random(5, 4)}, weights).program, tp=2)
    assert count(first, inferc.all_reduce.default) == 0
    assert first.weights["gate"].shape == (6, 4)


def test_packed_projections_are_split_part_by_part() -> None:
    def packed(x: Any, both: Any) -> Any:
        wide = aten.linear.default(x, both)
        return inferc.silu_mul.default(aten.slice.Tensor(wide, -1, 0, 3), aten.slice.Tensor(wide, -1, 3, 6))

    golden = """
        %x: float32[s0, 4] = input
        %0: float32[s0, 3] = aten.linear(%x, @both.0_3, None)
        %1: float32[s0, 3] = aten.linear(%x, @both.3_6, None)
        %2: float32[s0, 3] = inferc.silu_mul(%0, %1)
        return (%2)
    """
    example(packed, {"x": random(5, 4)}, {"both": random(6, 4)}).check(split_columns, 1, golden)

    def whole(x: Any, both: Any) -> Any:
        return aten.silu.default(aten.linear.default(x, both))

    example(whole, {"x": random(5, 4)}, {"both": random(6, 4)}).check_untouched(split_columns)


# --------------------------------------------------------------------------------------------- whole models


@pytest.mark.quick("llama-4", "mixtral-4")
@pytest.mark.parametrize(
    ("name", "tp"),
    [
        pytest.param(name, tp, marks=[pytest.mark.slow] if tp == 4 and name != "llama" else [])
        for name in MODELS
        for tp in (2, 4)
    ],
)
def test_ranks_together_are_the_whole(name: str, tp: int) -> None:
    assert_equal(name, Ranks(tp=tp))


@pytest.mark.quick("llama")
@pytest.mark.parametrize("name", ["llama", "tied", "mixtral", "deepseek_v3", "gpt_oss"])
def test_stages_one_after_the_other_are_the_whole(name: str) -> None:
    assert_equal(name, Ranks(pp=2))


def test_stages_of_ranks_are_the_whole() -> None:
    assert_equal("llama", Ranks(tp=2, pp=2))


@pytest.mark.quick("deepseek_v3", "llama", "mixtral")
@pytest.mark.parametrize("name", MODELS)
def test_collectives_of_a_layer(name: str) -> None:
    """A layer has one sum after attention and one after the MLP, or one for both if they are parallel; one gather."""
    for each in model(name).ranks(Ranks(tp=2)):
        assert count(each.program, inferc.all_reduce.default) == 2 * REDUCES.get(name, 2)
        assert count(each.program, inferc.all_gather.default) == 1


def test_each_rank_stores_its_part_and_what_is_replicated() -> None:
    whole = model("llama").whole()[0].program
    replicated = sum(
        weight.num_bytes
        for name, weight in whole.weights.items()
        if "norm" in name or "embed" in name or "inv_freq" in name
    )
    for tp in (2, 4):
        sizes = [weight_bytes(each.program) for each in model("llama").ranks(Ranks(tp=tp))]
        # Four ranks share two KV heads: of K and V each stores a half and not a quarter.
        shared = 0 if tp == 2 else 2 * 2 * (32 * 32 * 4) // 4
        assert sizes == [(weight_bytes(whole) - replicated) // tp + replicated + shared] * tp


@pytest.mark.slow
def test_kv_groups_hold_the_ranks_own_heads() -> None:
    assert [each.program.kv_groups[0].num_kv_heads for each in model("llama").ranks(Ranks(tp=2))] == [1, 1]
    assert [each.program.kv_groups[0].num_kv_heads for each in model("gpt_neox").ranks(Ranks(tp=2))] == [2, 2]
    first, second = (each.program for each in model("llama").ranks(Ranks(pp=2)))
    assert (first.kv_groups[0].layers, second.kv_groups[0].layers) == ((0,), (1,))
    assert [node.name for node in second.inputs()][:3] == ["token_ids", "positions", "hidden_in"]


@pytest.mark.slow
def test_one_rank_is_what_lowering_makes() -> None:
    module = random_module("llama")
    whole, (alone,) = export_module(module, "float32"), lower_ranks(export_module(module, "float32"), CONFIG, Ranks())
    lower(whole, CONFIG)
    assert alone.program.to_text() == whole.to_text()


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.slow
def test_heads_that_do_not_divide_say_what_would() -> None:
    with pytest.raises(
        UnsupportedError, match=r"layers\.0\.attention\.out: 4 heads do not divide over --tp 3; use --tp 2, 4$"
    ):
        shard(model("llama").prepared, tp=3)
    fields = {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 48}
    prepared = Model(random_module("llama", **fields)).prepared
    with pytest.raises(UnsupportedError, match=r"3 KV heads do not divide over --tp 2; use --tp 3, 6, 12$"):
        shard(prepared, tp=2)


@pytest.mark.slow
def test_a_norm_over_all_heads_is_named() -> None:
    prepared = Model(random_module("olmo2")).prepared
    with pytest.raises(
        UnsupportedError, match=r"as inferc\.rms_norm \(layers\.0\.attention\.q_norm.*\) needs all of them"
    ):
        shard(prepared, tp=2)


def test_more_stages_than_layers() -> None:
    with pytest.raises(UnsupportedError, match="--pp 3: the model has 2 layers; use --pp 2 or fewer"):
        shard(model("llama").prepared, pp=3)


@pytest.mark.parametrize("sizes", [{"tp": 0}, {"pp": -1}, {"tp": 2, "ep": 2}])
def test_ranks_that_cannot_be(sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        Ranks(**sizes)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ pieces


def test_cuts_are_even_or_whole_panels() -> None:
    assert cuts(64, 4) == [0, 16, 32, 48, 64]
    assert cuts(18, 2) == [0, 9, 18]
    assert cuts(40, 3) == [0, 16, 32, 40]
    assert cuts(7, 2) == [0, 4, 7]
    assert cuts(5, 4) == [0, 1, 2, 3, 5]


def test_stages_are_balanced_by_bytes() -> None:
    assert balance([5, 1, 1, 1], 2) == [0, 1]
    assert balance([1, 1, 1, 5], 2) == [0, 3]
    assert balance([2, 2, 2, 2], 4) == [0, 1, 2, 3]


def test_a_collective_alone_says_what_it_needs() -> None:
    x = torch.ones(2, 3)
    assert torch.equal(all_reduce(x, "tp", 1), x)
    assert torch.equal(all_gather(x, "tp", 0, [3], -1), x)
    with pytest.raises(InfercError, match="needs 2 ranks and none is joined"):
        all_reduce(x, "tp", 2)


def test_a_rank_that_fails_ends_the_others() -> None:
    def fails() -> None:
        raise ValueError("no weights")

    with pytest.raises(ValueError, match="no weights"):
        run_ranks("tp", [lambda: all_reduce(torch.ones(1), "tp", 2), fails])
