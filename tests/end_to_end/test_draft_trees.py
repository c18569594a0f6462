"""Trees of drafts on compiled artifacts: several tokens are tried for one place, and no answer changes by it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES
from random_models import make_random_model
from speculated import FORMS, HOW, WITH_FORMS, Asked, Machines, always_draft

from inferc import LLM, SamplingParams
from inferc.compiler.build import compile
from inferc.config import CompileConfig
from inferc.errors import ConfigError, UnsupportedError
from inferc.runtime.engine.load import load_engine
from inferc.runtime.runners.api import Capability
from inferc.runtime.runners.cpu.factory import CpuRunnerFactory
from inferc.runtime.scheduler.branches import Branches
from inferc.runtime.speculation.speculation import Speculation
from inferc.runtime.step.plan import StepPlan


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens in branches that each landed tree gave its sequence."""
    found, choose = list[int](), Branches.choose

    def count(self: Branches, slot: int, plan: StepPlan, rows: list[int]) -> None:
        first = int(plan.query_start_loc[plan.num_seqs - plan.num_branches])
        found.append(int((plan.logits_rows[rows] >= first).sum()))
        choose(self, slot, plan, rows)

    monkeypatch.setattr(Branches, "choose", count)
    return found


ASKED = [
    Asked("longer", "free", "greedy", "logprobs", 40),
    Asked("repeats", "schema", "penalized", "logprobs", 30),
    Asked("long", "free", "seeded", "two", 40),
    Asked("short", "free", "ruled", "logprobs", 40),
]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("llama", {"quantize": "w8a8", "kv_dtype": "int8"}),
    "bfloat16": ("llama", {"dtype": "bfloat16", "block_size": 16}),
    "windows": ("qwen2-windows", {"block_size": 16}),
    "latent": ("deepseek_v2", {}),
    "reference": ("qwen2-windows", {"target": "reference"}),
}


@pytest.fixture(scope="module", params=[pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS])
def machines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    name, config = KINDS[request.param]
    room, family = tmp_path_factory.mktemp("trees"), FAMILIES[name]
    make_random_model(family.model_type(name), room / "model", **family.fields)
    compile(room / "model", room / "out", CompileConfig(certify="none", **config))
    made = Machines(room / "out", ({}, {"max_num_batched_tokens": 12, "max_num_seqs": 4}))
    made.is_reference = request.param == "reference"
    yield made
    made.close()


@pytest.mark.parametrize("variant", [0, 1])
@pytest.mark.parametrize("branching", [0.3, 0.7])
def test_every_kind_of_cache_has_what_was_chosen(
    machines: Machines, chosen: list[int], variant: int, branching: float
) -> None:
    """Integers with their scales, window layers, latents, and the reference, whose last bits are those of any batch."""
    expected = [machines.alone(each) for each in ASKED]
    machines.drafter.right, machines.drafter.branching = 0.9, branching
    machines.drafter.random.seed(variant)
    for _ in range(3):
        for found, wanted in zip(machines.together(variant, ASKED, [0, 0, 2, 3]), expected, strict=True):
            assert (found.tokens, found.reasons) == (wanted.tokens, wanted.reasons)
            for one, other in zip(found.logprobs, wanted.logprobs, strict=True):
                close = [(token, pytest.approx(value, abs=1e-4), rank) for token, value, rank in other]
                assert one == (close if machines.is_reference else other)
    assert sum(map(bool, chosen)) > 5 and max(chosen) > 1, "branches were chosen"


# ------------------------------------------------------------------------------------------- as people use them


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the weights of the tiny one, but for some noise: its second choices are right at times."""
    room = tmp_path_factory.mktemp("other")
    make_random_model("llama", room / "model", num_hidden_layers=1)
    compile(room / "model", room / "out", CompileConfig(certify="none"))
    return room / "out"


def in_trees(speculation: Speculation) -> None:
    """Draft as if second choices were nearly as good as first ones, of which no two in a row are likely right."""
    acceptance = speculation._acceptance
    acceptance.rate = lambda slot, offer: 0.4  # type: ignore[method-assign]
    acceptance.beside = lambda offer: [0.6, 0.5, 0.4][: offer.num_others]  # type: ignore[method-assign]


@pytest.mark.parametrize("how", HOW)
def test_trees_of_a_draft_model_change_no_answer(tiny_artifact: Path, other: Path, chosen: list[int], how: str) -> None:
    """The second choices of another model are right about as often as those of a die, and chosen now and then."""
    asked = [Asked("repeats", form, how, "logprobs", 48) for form in FORMS if how in WITH_FORMS or form == "free"]
    prompts, params = [[5, 6, 7]] * len(asked), [each.params for each in asked]
    found = []
    for options in ({}, {"speculate": f"draft:{other}", "speculate_branches": 4, "speculate_tokens": 8}):
        with LLM(tiny_artifact, num_threads=1, max_num_seqs=4, **options) as llm:
            if options:
                in_trees(always_draft(llm))
            answers = [one.outputs[0] for one in llm.generate(prompts, params)]
            found.append([(one.token_ids, one.logprobs, one.finish_reason) for one in answers])
    assert found[0] == found[1] and len(chosen) > 10


def test_a_second_choice_that_is_right_saves_a_step(tiny_artifact: Path, chosen: list[int]) -> None:
    """A model that drafts for itself, but chooses by other random numbers: what it did not choose is right at times."""
    prompts = [[5, 6], [7, 8, 9], [10, 11, 12, 13]]
    params = [SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.6, top_k=3, seed=at) for at in range(3)]
    found, steps = [], []
    for options in ({}, *({"speculate": f"draft:{tiny_artifact}", "speculate_branches": count} for count in (1, 3))):
        with LLM(tiny_artifact, num_threads=1, **options) as llm:
            if options:
                speculation = always_draft(llm)
                in_trees(speculation)
                drafter = speculation.drafter._other  # type: ignore[attr-defined]
                plan = drafter._plan

                def reseeded(*args: Any, plan: Any = plan) -> StepPlan:
                    made: StepPlan = plan(*args)
                    made.sample.seeds = made.sample.seeds + 100
                    return made

                drafter._plan = reseeded
            found.append([one.outputs[0].token_ids for one in llm.generate(prompts, params)])
            steps.append(llm.stats().num_steps)
    assert found[0] == found[1] == found[2]
    assert sum(chosen) > 10 and steps[2] < steps[1] < steps[0]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"speculate_branches": 0}, "speculate_branches is 0, expected 1 to 16"),
        ({"speculate_branches": 17}, "speculate_branches is 17, expected 1 to 16"),
        (
            {"speculate": "ngram", "speculate_branches": 2},
            "speculate_branches is 2, and --speculate ngram knows one token for each place; leave it out, or have a",
        ),
    ],
    ids=str,
)
def test_what_branches_do_not_go_with_is_told(tiny_artifact: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_engine(tiny_artifact, **options)


def test_a_target_that_computes_chains_only_refuses_branches(
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    able = CpuRunnerFactory.capabilities

    def capabilities(self: CpuRunnerFactory, artifact: Any) -> frozenset[Capability]:
        return able(self, artifact) - {"draft_trees"}

    monkeypatch.setattr(CpuRunnerFactory, "capabilities", capabilities)
    with pytest.raises(UnsupportedError, match=r"--speculate-branches 4: .* its steps compute one chain of drafts"):
        load_engine(tiny_artifact, speculate=f"draft:{tiny_artifact}", speculate_branches=4)
