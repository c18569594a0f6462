"""LoRA adapters on a fake GPU: each row gets what its own adapter adds, and adapters come and go between steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from cuda_runs import logits as logits_of
from fake_gpu import ARTIFACTS, OTHER, PROMPT, Pair, opened, plans
from lowered import make_plan

from inferc.runtime.adapters.arrange import ArrangedAdapter, arrange, room_for_adapters
from inferc.runtime.adapters.peft import read_peft
from inferc.runtime.step.plan import F32, StepPlan

# The adapters of slots in each turn, and what is put at numbers before it.
TURNS: list[tuple[dict[int, int], dict[int, str | None]]] = [
    ({0: 2}, {2: "everything"}),
    ({}, {}),
    ({0: 2, 1: 3}, {2: "attention", 3: "everything"}),
    ({1: 3}, {2: None}),
]


@pytest.fixture(scope="module", params=["fast", "deterministic"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with opened("adapted", deterministic=request.param == "deterministic") as made:
        yield made


def adapter(pair: Pair, name: str) -> ArrangedAdapter:
    room = room_for_adapters(pair.artifact)
    assert room is not None
    return arrange(read_peft(ARTIFACTS / "adapters" / name), room, "float32")


def put(pair: Pair, number: int, name: str | None) -> None:
    made = None if name is None else adapter(pair, name)
    for runner in (pair.runner, pair.oracle):
        runner.set_adapter(number, made)


def expected_logits(pair: Pair, plan: StepPlan) -> F32:
    return pair.oracle._logits(plan)


def with_adapters(plan: StepPlan, of_slots: dict[int, int]) -> StepPlan:
    ids = np.array([of_slots.get(slot, 0) for slot in plan.seq_slots.tolist()], np.int32)
    return replace(plan, adapter_ids=ids if ids.any() else np.zeros(0, np.int32))


def check(pair: Pair, plan: StepPlan) -> F32:
    found, expected = logits_of(pair.runner, pair.artifact, plan), expected_logits(pair, plan)
    np.testing.assert_allclose(found, expected, atol=3e-5 * np.abs(expected).max())
    return found


def test_each_sequence_has_its_own_adapter(pair: Pair) -> None:
    put(pair, 1, "everything")
    put(pair, 7, "attention")
    of_slots = {0: 1, 2: 7}
    for plan in plans():
        check(pair, with_adapters(plan, of_slots))
    changed = check(pair, with_adapters(make_plan([(3, PROMPT, 0)]), {3: 1}))
    plain = check(pair, make_plan([(3, PROMPT, 0)]))
    assert np.abs(changed - plain).max() > 0.1 * np.abs(plain).max()


def test_a_graph_serves_adapters_that_come_and_go(pair: Pair) -> None:
    """Decode steps run as graphs, one for steps with adapters and one for those without."""
    prompts = make_plan([(0, PROMPT, 0), (1, OTHER[:5], 0)])
    for turn, (of_slots, names) in enumerate(TURNS):
        for number, name in names.items():
            put(pair, number, name)
        pair.run(with_adapters(prompts, of_slots))
        pair.expected(with_adapters(prompts, of_slots))
        decode = make_plan([(0, [8], len(PROMPT)), (1, [9 + turn], 5)])
        found, expected = (run(with_adapters(decode, of_slots)) for run in (pair.run, pair.expected))
        np.testing.assert_array_equal(found.token_ids, expected.token_ids)
        check(pair, with_adapters(make_plan([(0, [8], len(PROMPT)), (1, [9 + turn], 5)]), of_slots))


def test_many_rows_of_logits_are_computed_in_chunks(pair: Pair) -> None:
    """The LM head has an adapter, too: its rows find their tokens in every chunk."""
    put(pair, 4, "everything")
    ids = list(range(3, 90))
    check(pair, with_adapters(make_plan([(1, ids[:40], 0), (3, ids[40:], 0)], all_rows=True), {3: 4}))
