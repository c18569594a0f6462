"""Speculation on compiled artifacts: with any drafts, the tokens of every answer are those that it has without."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from adapters import write_adapter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_models import make_random_model
from speculated import (
    ADAPTERS,
    FORMS,
    HOW,
    PROMPTS,
    WITH_FORMS,
    Asked,
    Machines,
    always_draft,
    requests_of,
)

from inferc import LLM, SamplingParams
from inferc.compiler.build import compile
from inferc.config import CompileConfig
from inferc.errors import ArtifactError, ConfigError, UnsupportedError
from inferc.runtime.engine import load
from inferc.runtime.engine.load import load_engine
from inferc.runtime.scheduler.branches import Branches
from inferc.runtime.speculation.forced import ForcedDrafter
from inferc.runtime.step.plan import StepPlan

SCHEMES: dict[str, Any] = {"float32": None, "int8": "int8", "int4": "int4"}


@pytest.fixture(scope="module", params=SCHEMES)
def machines(
    request: pytest.FixtureRequest, tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Machines]:
    folder = tmp_path_factory.mktemp("speculation")
    config = CompileConfig(quantize=SCHEMES[request.param], certify="none", adapter_rank=4)
    compile(tiny_llama_folder, folder / "out", config)
    first = write_adapter(folder / "a", tiny_llama_folder, rank=4, seed=1)
    second = write_adapter(folder / "b", tiny_llama_folder, rank=2, targets=("q_proj", "down_proj", "lm_head"), seed=2)
    made = Machines(folder / "out", adapters=[f"first={first}", f"second={second}"])
    yield made
    made.close()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    variant=st.integers(0, len(Machines.VARIANTS) - 1),
    asked=st.lists(requests_of(*ADAPTERS), min_size=1, max_size=6),
    steps=st.lists(st.integers(0, 12), min_size=6, max_size=6),
    right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    branching=st.sampled_from([0.0, 0.3, 0.7]),
    seed=st.integers(0, 2**16),
)
def test_the_product_of_all_features_has_the_same_tokens(
    machines: Machines,
    variant: int,
    asked: list[Asked],
    steps: list[int],
    right: float,
    branching: float,
    seed: int,
) -> None:
    """Greedy and seeded, free and held to a form, with adapters, cached or not, batched, in chunks and preempted."""
    expected = [machines.alone(each) for each in asked]
    machines.drafter.random.seed(seed)
    machines.drafter.right, machines.drafter.branching = right, branching
    assert machines.together(variant, asked, steps[: len(asked)]) == expected


def test_right_drafts_save_steps_and_wrong_ones_cost_none(machines: Machines) -> None:
    asked, engine = Asked("short", "free", "seeded", max_tokens=24), machines.engines[0]
    engine.scheduler.drafts._speculator.wants_ids = lambda batch: True  # type: ignore[attr-defined]
    alone = machines.alone(asked)
    length, steps = len(alone.tokens[0]), {}
    assert length > 8
    machines.drafter.branching = 0.0
    for right in (0.0, 1.0):
        machines.drafter.right = right
        before = engine.stats()
        assert machines.together(0, [asked], [0]) == [alone]
        now = engine.stats()
        steps[right] = now.num_steps - before.num_steps
        num_accepted, num_drafted = now.num_accepted - before.num_accepted, now.num_drafted - before.num_drafted
        assert num_drafted > 0 and (num_accepted == num_drafted) == (right == 1.0)
        assert now.output_tokens - before.output_tokens == length
        assert steps[right] == length - num_accepted
    assert steps[1.0] < 0.7 * steps[0.0]


@pytest.mark.parametrize("how", HOW)
def test_a_tree_saves_as_many_steps_as_its_right_tokens(machines: Machines, how: str) -> None:
    """The right tokens are on any branches, and beside them as many wrong ones; none of their K and V is lost."""
    asked, engine = Asked("repeats", "free", how, others="logprobs", max_tokens=60), machines.engines[0]
    alone, speculator = machines.alone(asked), engine.scheduler.drafts._speculator  # type: ignore[attr-defined]
    chosen, choose = list[int](), Branches.choose

    def count(self: Branches, slot: int, plan: StepPlan, rows: list[int]) -> None:
        assert plan.tree is not None
        first = int(plan.query_start_loc[plan.num_seqs - plan.num_branches])
        chosen.append(int((plan.logits_rows[rows] >= first).sum()))
        choose(self, slot, plan, rows)

    machines.drafter.right, machines.drafter.branching = 1.0, 0.5
    machines.drafter.random.seed(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculator, "wants_ids", lambda batch: True)
        patch.setattr(Branches, "choose", count)
        before = engine.stats()
        assert machines.together(0, [asked], [0]) == [alone]
        now = engine.stats()
    length = len(alone.tokens[0])
    num_accepted, num_drafted = now.num_accepted - before.num_accepted, now.num_drafted - before.num_drafted
    assert now.num_steps - before.num_steps == length - num_accepted
    assert sum(map(bool, chosen)) > 3 and max(chosen) > 1, "branches were chosen"
    assert 0.2 * num_drafted < num_accepted < 0.8 * num_drafted


# --------------------------------------------------------------------------------------------- as people use it


TEXT = "def add(first, second):\n    return first + second\n\ndef add(first, second):\n    return"


@pytest.fixture(scope="module")
def plain(tiny_artifact: Path) -> Iterator[LLM]:
    with LLM(tiny_artifact, max_num_seqs=4, num_threads=1) as made:
        yield made


@pytest.fixture(scope="module")
def ngram(tiny_artifact: Path) -> Iterator[LLM]:
    with LLM(tiny_artifact, max_num_seqs=4, num_threads=1, speculate="ngram", speculate_tokens=5) as made:
        always_draft(made)
        yield made


@pytest.mark.parametrize("how", HOW)
def test_ngram_gives_the_same_answers(plain: LLM, ngram: LLM, how: str) -> None:
    params = SamplingParams(max_tokens=48, ignore_eos=True, **{**HOW[how], "logit_bias": {30: 9.0, 31: 8.5, 32: 8.0}})
    expected = plain.generate([TEXT, TEXT[:20]], params)
    found = ngram.generate([TEXT, TEXT[:20]], params)
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in expected]
    assert [one.outputs[0].text for one in found] == [one.outputs[0].text for one in expected]
    assert ngram.stats().num_drafted > 0 and plain.stats().num_drafted == 0


def test_an_answer_that_was_given_before_takes_few_steps(plain: LLM, tiny_artifact: Path) -> None:
    """Tokens are drafted from those of earlier requests that begin alike, and no other's."""
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.0, seed=4)
    prompt, steps = [*range(20, 70)], []
    expected = plain.generate([prompt], params)[0].outputs[0].token_ids
    with LLM(tiny_artifact, max_num_seqs=2, num_threads=1, speculate="ngram:shared", speculate_tokens=15) as llm:
        always_draft(llm)
        for asked in (
            params,
            params,
            replace(params, cache_salt="other"),
            replace(params, cache_salt="other"),
        ):
            before = llm.stats().num_steps
            assert llm.generate([prompt], asked)[0].outputs[0].token_ids == expected
            steps.append(llm.stats().num_steps - before)
    assert min(steps[0], steps[2]) > 40 and max(steps[1], steps[3]) < 12, steps


def test_an_answer_ends_at_its_stop_string_whatever_came_with_it(plain: LLM, ngram: LLM) -> None:
    """Tokens behind the stop string that came in the same step are no part of the answer."""
    free = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logit_bias={40: 9.0, 41: 8.9}, logprobs=0)
    text = plain.generate(TEXT, free)[0].outputs[0].text
    for start in range(3, 12, 2):
        params = SamplingParams(
            temperature=0,
            max_tokens=40,
            ignore_eos=True,
            logit_bias={40: 9.0, 41: 8.9},
            logprobs=0,
            stop=(text[start : start + 2],),
        )
        (one,), (other,) = (llm.generate(TEXT, params)[0].outputs for llm in (plain, ngram))
        assert (one.text, one.token_ids, one.finish_reason, one.stop) == (
            other.text,
            other.token_ids,
            other.finish_reason,
            other.stop,
        )
        assert one.logprobs == other.logprobs and len(other.logprobs or ()) == len(other.token_ids)


def test_what_a_form_leaves_no_choice_about_is_drafted_without_being_asked(
    tiny_artifact: Path, machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of properties and brackets take fewer steps; the tokens are those of an engine that drafts nothing."""
    asked = [Asked(prompt, "schema", how, max_tokens=64) for prompt in PROMPTS for how in WITH_FORMS]
    prompts, params = [list(PROMPTS[each.prompt]) for each in asked], [each.params for each in asked]
    found, steps = {}, {}
    for drafts in (False, True):
        with monkeypatch.context() as patch:
            if not drafts:
                patch.setattr(load, "make_speculation", lambda *_: None)
            with LLM(tiny_artifact, max_num_seqs=4, num_threads=1) as llm:
                if drafts:
                    always_draft(llm)
                found[drafts] = [one.outputs[0].token_ids for one in llm.generate(prompts, params)]
                stats = llm.stats()
                assert (stats.num_drafted > 0) == drafts
                steps[drafts] = stats.num_steps
    assert stats.num_accepted > 0.5 * stats.num_drafted and steps[True] < steps[False]
    assert found[True] == found[False]


def test_what_keeps_values_of_steps_drafts_nothing(tiny_artifact: Path) -> None:
    engine = load_engine(tiny_artifact, max_num_seqs=2, num_threads=1, tap=("*attention.out",))
    try:
        assert engine.speculation is None
    finally:
        engine.close()


# ------------------------------------------------------------------------------------------------ draft models


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of another shape, with the tokenizer of the tiny one."""
    folder = tmp_path_factory.mktemp("other") / "other"
    make_random_model("llama", folder, num_hidden_layers=1, hidden_size=32)
    return folder


@pytest.fixture(scope="module")
def other(other_folder: Path) -> Path:
    compile(other_folder, other_folder.parent / "out", CompileConfig(certify="none"))
    return other_folder.parent / "out"


DRAFTED = [
    {},
    {"prefix_cache": False, "num_threads": 2},
    {"max_num_batched_tokens": 12, "max_num_seqs": 4},
    {"kv_memory_bytes": 6 * 32 * 2 * 2 * 2 * 16 * 4 * 2, "overcommit": True},
]


@pytest.mark.parametrize("options", DRAFTED, ids=str)
def test_a_model_that_drafts_for_itself_is_always_right(
    tiny_artifact: Path, plain: LLM, options: dict[str, Any]
) -> None:
    """The K and V that it keeps are where they belong: in chunks, from the prefix cache, and after a preemption."""
    prompts: list[list[int]] = [list(ids) for ids in PROMPTS.values()] * 2
    params = [SamplingParams(max_tokens=40, ignore_eos=True, seed=index, temperature=index % 2) for index in range(8)]
    expected = [one.outputs[0].token_ids for one in plain.generate(prompts, params)]
    with LLM(tiny_artifact, **{"num_threads": 1, "speculate": f"draft:{tiny_artifact}", **options}) as llm:
        always_draft(llm)
        for _ in range(2):  # the second time prompts are found in the cache
            assert [one.outputs[0].token_ids for one in llm.generate(prompts, params)] == expected
        stats = llm.stats()
        assert stats.num_drafted > 100 and stats.num_accepted == stats.num_drafted
        assert (stats.num_preemptions > 0) == ("kv_memory_bytes" in options)
        assert (stats.cached_tokens > 0) == ("prefix_cache" not in options)


def test_a_draft_model_drafts_within_a_form(tiny_artifact: Path, plain: LLM) -> None:
    """One that drafts for itself chooses what the large model chooses among the tokens that fit."""
    asked = [Asked(prompt, form, how) for prompt in PROMPTS for form in FORMS for how in ("greedy", "seeded")]
    prompts, params = [list(PROMPTS[each.prompt]) for each in asked], [each.params for each in asked]
    expected = [one.outputs[0].token_ids for one in plain.generate(prompts, params)]
    with LLM(tiny_artifact, num_threads=1, speculate=f"draft:{tiny_artifact}") as llm:
        speculation = always_draft(llm)
        assert isinstance(speculation.drafter, ForcedDrafter) and speculation.drafter._other is not None
        speculation.drafter = speculation.drafter._other  # without what forms force, whose spelling is a guess
        assert [one.outputs[0].token_ids for one in llm.generate(prompts, params)] == expected
        stats = llm.stats()
        assert stats.num_drafted > 100 and stats.num_accepted == stats.num_drafted


@pytest.mark.parametrize("options", DRAFTED, ids=str)
def test_drafts_of_another_model_change_no_answer(
    tiny_artifact: Path, other: Path, plain: LLM, options: dict[str, Any]
) -> None:
    asked = [Asked(prompt, form, how) for prompt in PROMPTS for form in FORMS for how in HOW]
    asked = [each for each in asked if each.how in WITH_FORMS or each.form == "free"]
    prompts, params = [list(PROMPTS[each.prompt]) for each in asked], [each.params for each in asked]
    expected = [one.outputs[0].token_ids for one in plain.generate(prompts, params)]
    with LLM(tiny_artifact, **{"num_threads": 1, "speculate": f"draft:{other}", **options}) as llm:
        always_draft(llm)
        assert [one.outputs[0].token_ids for one in llm.generate(prompts, params)] == expected
        stats = llm.stats()
        assert stats.num_drafted > stats.num_accepted


def test_a_draft_model_must_fit(tiny_llama_folder: Path, tiny_artifact: Path, tmp_path: Path) -> None:
    made = {}
    for name, config in {
        "blocks": CompileConfig(certify="none", block_size=16),
        "ranks": CompileConfig(certify="none", tp=2),
    }.items():
        made[name] = tmp_path / name
        compile(tiny_llama_folder, made[name], config)
    shutil.copytree(tiny_llama_folder, tmp_path / "renamed")
    tokenizer = json.loads((tmp_path / "renamed" / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.get)[40:42]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (tmp_path / "renamed" / "tokenizer.json").write_text(json.dumps(tokenizer))
    made["words"] = tmp_path / "words"
    compile(tmp_path / "renamed", made["words"], CompileConfig(certify="none"))
    told = {
        "blocks": "its KV blocks hold 16 tokens, and those of .* 32; compile both with the same block_size",
        "ranks": "it runs in 2 ranks; compile it without --tp, --pp and --ep",
        "words": "has another vocabulary than .*: token 40 is .*, not .*; a draft model needs the same",
    }
    for name, path in made.items():
        with pytest.raises(ConfigError, match=f"--speculate draft:{path}:? {told[name]}"):
            load_engine(tiny_artifact, speculate=f"draft:{path}")
    with pytest.raises(ArtifactError, match="no artifact at /nowhere"):
        load_engine(tiny_artifact, speculate="draft:/nowhere")


def test_the_memory_of_the_cache_is_shared_with_the_draft_model(tiny_artifact: Path, other: Path) -> None:
    memory = 64 * 32 * 2 * 2 * 2 * 16 * 4
    engines = [
        load_engine(tiny_artifact, kv_memory_bytes=memory, max_num_seqs=2, num_threads=1, speculate=speculate)
        for speculate in ("none", f"draft:{tiny_artifact}")
    ]
    try:
        counts = [engine.scheduler.config.num_blocks[0] for engine in engines]
        assert counts[0] == 64 and counts[1] == 32, "the same model takes as much again"
    finally:
        for engine in engines:
            engine.close()


# ------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"speculate": "medusa:x"},
            "speculate is 'medusa:x': medusa is not built yet, expected none, ngram, ngram:shared",
        ),
        ({"speculate": "fast"}, "speculate is 'fast', expected none, ngram, ngram:shared, mtp, draft:PATH"),
        ({"speculate": "draft:"}, "speculate is 'draft:', expected none, ngram, ngram:shared, mtp, draft:PATH"),
        ({"speculate": "eagle3"}, "speculate is 'eagle3', expected none, ngram, ngram:shared, mtp, draft:PATH"),
        ({"speculate": "ngram:all"}, "speculate is 'ngram:all', expected none, ngram, ngram:shared"),
        ({"speculate": "suffix"}, "speculate is 'suffix': suffix decoding is ngram:shared here, expected none"),
        (
            {"speculate": "draft:x", "kv_disk": "y"},
            "does not go with --kv-disk y: K and V of what drafts are not",
        ),
        ({"speculate": "ngram", "speculate_tokens": 64}, "speculate_tokens is 64, expected 1 to 63"),
        ({"speculate": "ngram", "kv_evict": "sinks:4+window:64"}, "does not go with --kv-evict .*: a token that"),
        ({"speculate": "ngram", "tap": ("logits",)}, "--speculate ngram does not go with --tap logits: the values"),
    ],
    ids=str,
)
def test_what_does_not_go_with_speculation_is_told(tiny_artifact: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_engine(tiny_artifact, **options)


def test_a_target_that_computes_no_drafts_refuses_them(tiny_llama_folder: Path, tmp_path: Path) -> None:
    compile(tiny_llama_folder, tmp_path / "out", CompileConfig(target="onnx", certify="none"))
    with pytest.raises(UnsupportedError, match=r"--speculate ngram: .* its steps sample one token of a sequence"):
        load_engine(tmp_path / "out", speculate="ngram")
