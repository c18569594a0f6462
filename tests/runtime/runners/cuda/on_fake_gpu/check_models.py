"""Steps of every model: the reference's logits and ids, launch by launch and as graphs, in both orders of addition."""

from collections.abc import Iterator

import numpy as np
import pytest
from fake_cublaslt import FakeCublasLt
from fake_gpu import LIBRARY, MODELS, OTHER, PROMPT, TOLERANCE, Pair, opened, plans
from lowered import make_plan

PLAIN = [name for name in MODELS if not name.endswith(LIBRARY)]
ONE_ANSWER = [name for name in PLAIN if TOLERANCE[name] < 0.01]  # else it may as well be a token that is as likely


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with opened(request.param, with_library=FakeCublasLt if request.param.endswith(LIBRARY) else None) as made:
        yield made


@pytest.mark.slow
def test_logits_are_the_references(pair: Pair) -> None:
    for plan in plans():
        found, expected = pair.logits(plan), pair.oracle._logits(plan)
        assert np.abs(found - expected).max() <= TOLERANCE[pair.artifact.path.name] * np.abs(expected).max()
    if pair.library is not None:
        assert {rows for rows, *_ in pair.library.computed} >= {29, 18, 3}


@pytest.mark.parametrize("name", ONE_ANSWER)
def test_ids_are_the_references_through_graphs(name: str) -> None:
    with opened(name) as pair:
        for plan in plans():
            assert pair.run(plan).token_ids.tolist() == pair.expected(plan).token_ids.tolist()
        assert pair.fake.calls["cuGraphLaunch"] == 1, "each sequence has one new token in the third"


@pytest.mark.parametrize("name", PLAIN)
def test_in_the_invariant_order_a_sequence_has_the_same_bits_alone(name: str) -> None:
    with opened(name, deterministic=True) as alone, opened(name, deterministic=True) as among:
        of_one = [make_plan([(0, PROMPT, 0)]), make_plan([(0, [8], 9)])]
        of_all = [
            make_plan([(0, PROMPT, 0), (1, OTHER, 0), (3, PROMPT[:3], 0)]),
            make_plan([(0, [8], 9), (1, [7], 35), (3, [6], 3)]),
        ]
        for one, every in zip(of_one, of_all, strict=True):
            assert alone.logits(one)[0].tobytes() == among.logits(every)[0].tobytes()
