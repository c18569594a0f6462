"""A step with sequences that have rules is scheduled when their last tokens are known, and no other step is."""

from __future__ import annotations

from fake_runner import make_engine, oracle

from inferc.runtime.engine.engine import Engine
from inferc.runtime.step.plan import StepPlan
from inferc.runtime.step.sampling_params import SamplingParams

PLAIN = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
RULED = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, no_repeat_ngram_size=1)


def run(engine: Engine, requests: dict[str, SamplingParams]) -> tuple[list[StepPlan], dict[str, list[int]]]:
    """Return the plans of all steps, and what each request got."""
    plans: list[StepPlan] = []
    submit = engine.runner.submit

    def noted(plan: StepPlan) -> None:
        plans.append(plan)
        submit(plan)

    engine.runner.submit = noted  # type: ignore[method-assign]
    found: dict[str, list[int]] = {name: [] for name in requests}
    for name, params in requests.items():
        engine.add_request(name, [3, 4, 5], params)
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] += output.token_ids
    return plans, found


def test_steps_wait_for_tokens_only_while_a_sequence_has_rules() -> None:
    plans, found = run(make_engine(), {"plain": PLAIN, "ruled": RULED})
    waits = [not len(plan.pending_rows) for plan in plans]
    assert waits == [True] * 9 + [False] * 15
    for name, params in {"plain": PLAIN, "ruled": RULED}.items():
        assert found[name] == oracle([3, 4, 5], params, (), 64)[0]
    assert len(set(found["ruled"])) == 8 and not {3, 4, 5} & set(found["ruled"])
    plans, _ = run(make_engine(), {"one": PLAIN, "other": PLAIN})
    assert [not len(plan.pending_rows) for plan in plans] == [True] + [False] * 23


def test_each_row_behind_a_draft_has_the_lists_of_its_own_place() -> None:
    engine = make_engine(drafts=5)
    plans, found = run(engine, {"ruled": SamplingParams(temperature=0, max_tokens=30, no_repeat_ngram_size=1)})
    assert (
        found["ruled"]
        == oracle([3, 4, 5], SamplingParams(temperature=0, max_tokens=30, no_repeat_ngram_size=1), (), 64)[0]
    )
    drafted = [plan for plan in plans if len(plan.num_drafted)]
    assert drafted
    for plan in drafted:
        lengths = [
            end - start for start, end in zip(plan.sample.banned.starts, plan.sample.banned.starts[1:], strict=False)
        ]
        assert lengths == list(range(lengths[0], lengths[0] + len(lengths))), "one token more is there for each row"
