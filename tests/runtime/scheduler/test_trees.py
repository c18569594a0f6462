"""Trees of drafts in a schedule: the blocks that branches are lent, and what becomes of the tokens in them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from fake_drafts import AnyDrafts
from fake_runner import FakeRunner, make_engine, oracle

from inferc.errors import RequestError
from inferc.kv_groups import WindowCacheGroup
from inferc.runtime.engine.engine import Engine
from inferc.runtime.scheduler.batch import Batch
from inferc.runtime.scheduler.drafts import Drafts
from inferc.runtime.speculation.speculation import Reserve
from inferc.runtime.step.limits import StepLimits
from inferc.runtime.step.plan import StepPlan
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.step.tree import Tree

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


class OnBranch:
    """A source of drafts whose right tokens are all in the last of some branches, `length` of them."""

    def __init__(self, engine: Engine, length: int, num_wrong: int = 1) -> None:
        self.engine, self.length, self.num_wrong = engine, length, num_wrong
        assert isinstance(engine.speculation, AnyDrafts)
        self.go_on = engine.speculation._scripted._go_on
        engine.speculation.draft = self.draft  # type: ignore[method-assign]
        engine.speculation.wants_ids = lambda batch: True  # type: ignore[method-assign]
        self.engine.speculation._kinds = dict.fromkeys(range(8), 0)  # type: ignore[union-attr]

    def draft(
        self, batch: Batch, slots: Sequence[int], room: Sequence[int], num_tokens: int, reserve: Reserve
    ) -> list[Tree]:
        found = []
        for slot, count in zip(slots, room, strict=True):
            seq = batch.seqs[slot]
            assert seq is not None
            count = reserve(slot, min(count, self.length + self.num_wrong))
            right = self.go_on(seq, batch.tokens[slot, : batch.num_known[slot]].tolist(), count)[: self.length]
            wrong = [token for token in range(self.num_wrong + 1) if token not in right[:1]][: self.num_wrong]
            parents = [-1] * (len(wrong) + 1) + list(range(len(wrong), len(wrong) + len(right) - 1))
            ids = [*wrong, *right][:count]
            found.append(Tree(ids, parents[: len(ids)]))
        return found


def alone(prompt: list[int], max_tokens: int) -> list[int]:
    return oracle(prompt, SamplingParams(max_tokens=max_tokens, **GREEDY), (), len(prompt) + max_tokens)[0]


def run(engine: Engine, prompts: list[list[int]], max_tokens: int = 20) -> list[list[int]]:
    for name, prompt in enumerate(prompts):
        engine.add_request(str(name), prompt, SamplingParams(max_tokens=max_tokens, **GREEDY))
    found: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for output in engine.step():
            found[int(output.request_id)] += output.token_ids
        engine.scheduler.check_integrity()
    return found


PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [5, 6, 8]]
GROUPS = [None, (WindowCacheGroup(8, window=3), WindowCacheGroup(8, window=9))]


@pytest.mark.parametrize("groups", GROUPS, ids=["full", "windows"])
@pytest.mark.parametrize("length", [1, 2, 6])
def test_a_step_gives_what_is_right_on_a_branch(length: int, groups: Any) -> None:
    """Branches of one token, of a block and more, and across the end of a window."""
    options: dict[str, Any] = {} if groups is None else {"groups": groups}
    engine = make_engine(drafts=0, max_num_batched_tokens=40, num_blocks=60, prefix_cache=True, **options)
    OnBranch(engine, length)
    expected = [alone(prompt, 20) for prompt in PROMPTS]
    for _ in range(2):  # the second time from the prefix cache
        assert run(engine, PROMPTS) == expected
    stats, runner = engine.stats(), engine.runner
    assert isinstance(runner, FakeRunner) and runner.num_copied > 20
    # All but the last tokens of a sequence come `length + 1` at a time.
    assert stats.num_accepted >= 6 * (19 * length // (length + 1) - length)
    assert all(pool.num_free == pool.size for pool in engine.scheduler.cache.pools)


def test_a_branch_takes_no_block_that_a_running_sequence_may_need() -> None:
    engine = make_engine(drafts=0, num_blocks=13, max_num_batched_tokens=60, overcommit=True)
    OnBranch(engine, 1, num_wrong=5)
    cache, drafts = engine.scheduler.cache, engine.scheduler.drafts
    assert isinstance(drafts, Drafts)
    lend, spared = cache.lend, []

    def checked(count: int) -> list[list[int]]:
        blocks = lend(count)
        spared.append(min(cache.num_free) - engine.scheduler.num_running)
        return blocks

    cache.lend = checked  # type: ignore[method-assign]
    expected = [alone(prompt, 20) for prompt in PROMPTS]
    assert run(engine, PROMPTS) == expected
    assert spared and min(spared) == 0


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_aborted_and_preempted_sequences_leave_no_block_and_no_wrong_content(seed: int, prefix_cache: bool) -> None:
    """Between the step that chose a branch and the one that copies it, the branch counts as not computed."""
    rng = random.Random(seed)
    engine = make_engine(
        drafts=seed, num_blocks=16, max_num_batched_tokens=48, overcommit=True, prefix_cache=prefix_cache
    )
    OnBranch(engine, 5)
    waiting = {str(name): [rng.choice([5, 6]) for _ in range(rng.randint(1, 14))] for name in range(30)}
    found: dict[str, list[int]] = {name: [] for name in waiting}
    params = SamplingParams(max_tokens=24, **GREEDY)
    for name, prompt in waiting.items():
        engine.add_request(name, prompt, params)
    aborted: list[str] = []
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] += output.token_ids
        engine.scheduler.check_integrity()
        if rng.random() < 0.2 and engine.request_ids:
            aborted.append(rng.choice(engine.request_ids))
            engine.abort(aborted[-1])
    for name, prompt in waiting.items():
        expected = alone(prompt, 24)
        assert found[name] == expected or (name in aborted and found[name] == expected[: len(found[name])])
    assert engine.scheduler.num_preemptions > 0 and aborted
    assert all(pool.num_free == pool.size for pool in engine.scheduler.cache.pools)


def test_a_runner_of_chains_is_given_no_branch() -> None:
    engine, plans = make_engine(drafts=0, max_num_batched_tokens=40), list[StepPlan]()
    OnBranch(engine, 2)
    submit = engine.runner.submit

    def kept(plan: StepPlan) -> None:
        plans.append(plan)
        submit(plan)

    engine.runner.submit = kept  # type: ignore[method-assign]
    run(engine, PROMPTS[:1])
    plan = next(plan for plan in plans if plan.tree is not None)
    assert plan.num_branches == 1 and plan.num_seqs == 2
    limits = StepLimits(40, 4, 40, 1 << 20, (40,), 4, max_num_branches=1)
    limits.check(plan)
    with pytest.raises(RequestError, match="step plan: num_seqs 2 is out of range"):
        StepLimits(40, 4, 40, 1 << 20, (40,), 4).check(plan)
