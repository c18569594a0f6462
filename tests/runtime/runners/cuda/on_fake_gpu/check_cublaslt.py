"""Products that an artifact leaves to cuBLASLt: the reference's numbers with it and without it."""

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_cublaslt import FakeCublasLt
from fake_gpu import ARTIFACTS, LIBRARY, OTHER, PROMPT, TOLERANCE, Pair, config, opened, plans
from lowered import make_plan

from inferc.kv_groups import cache_groups
from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.runners.cuda.cublaslt import WORKSPACE_BYTES
from inferc.runtime.runners.cuda.footprint import PAGE, footprint, kv_available
from inferc.runtime.step.plan import StepPlan

LLAMA = f"llama{LIBRARY}"


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with opened(LLAMA, with_library=FakeCublasLt) as made:
        yield made


def ids(pair: Pair, plan: StepPlan) -> list[int]:
    return [int(token) for token in pair.run(plan).token_ids]


def computed(pair: Pair) -> list[int]:
    """The rows of the products that the library computed since this was asked last."""
    assert pair.library is not None
    rows = [rows for rows, *_ in pair.library.computed]
    pair.library.computed.clear()
    return rows


@pytest.mark.slow
def test_logits_are_the_references(pair: Pair) -> None:
    for plan in (*plans(), make_plan([(0, [5], 11)])):
        computed(pair)
        found, expected = pair.logits(plan), pair.oracle._logits(plan)
        assert np.abs(found - expected).max() <= TOLERANCE[pair.artifact.path.name] * np.abs(expected).max()
        rows = {each for each in (plan.num_tokens, len(plan.logits_rows)) if each > 1}
        assert set(computed(pair)) == rows


def test_ids_are_the_references_and_graphs_hold_products(pair: Pair) -> None:
    assert pair.library is not None
    computed(pair)
    for plan in plans():
        before = pair.library.calls.copy()
        assert ids(pair, plan) == [int(token) for token in pair.expected(plan).token_ids]
        assert not (pair.library.calls - before).keys() & {"cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmulAlgoCheck"}
    assert set(computed(pair)) == {29, 2, 18, 3, 4}, "a graph is of 4 sequences"


@pytest.mark.slow
def test_many_rows_of_logits(pair: Pair) -> None:
    """More than there is memory for at a time."""
    plan = make_plan([(0, OTHER, 0), (1, PROMPT * 6, 0)], all_rows=True)
    found, expected = pair.logits(plan), pair.oracle._logits(plan)
    assert np.abs(found - expected).max() <= TOLERANCE[pair.artifact.path.name] * np.abs(expected).max()


def test_without_the_library_the_kernels_compute(caplog: pytest.LogCaptureFixture) -> None:
    with opened(LLAMA) as made:
        (line,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
        assert line.startswith("cuBLASLt was measured to be faster than ")
        assert line.endswith(" kernels, which run all the same: no libcublasLt.so.13 on this machine")
        assert ids(made, plans()[0]) == made.expected(plans()[0]).token_ids.tolist()
        assert sum(memory.size == WORKSPACE_BYTES for memory in made.fake.device.values()) == 0


@pytest.mark.parametrize("options", [{"version": 110403}, {"starts": False}])
def test_a_library_that_cannot_be_used(caplog: pytest.LogCaptureFixture, options: dict[str, Any]) -> None:
    with opened(LLAMA, with_library=lambda gpu: FakeCublasLt(gpu, **options)) as made:
        (line,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
        assert ": cuBLASLt 1" in line and "\n" not in line
        assert made.runner.cublaslt_version is None


@pytest.mark.slow
def test_the_invariant_order_never_uses_it(caplog: pytest.LogCaptureFixture) -> None:
    with opened(LLAMA, with_library=FakeCublasLt, deterministic=True) as made:
        found = made.logits(plans()[0])
        assert made.library is not None and not made.library.calls
    with opened("llama", deterministic=True) as plain:
        assert found.tobytes() == plain.logits(plans()[0]).tobytes()
    assert not [each for each in caplog.records if each.levelno == logging.WARNING]


def test_its_workspace_is_planned_for() -> None:
    plain, artifact = load_artifact(ARTIFACTS / "llama"), load_artifact(ARTIFACTS / LLAMA)
    assert footprint(plain, 96, 4).workspace == footprint(artifact, 96, 4, deterministic=True).workspace == 0
    assert footprint(artifact, 96, 4).workspace == WORKSPACE_BYTES
    assert footprint(artifact, 96, 4).fixed - footprint(plain, 96, 4).fixed == WORKSPACE_BYTES
    groups = cache_groups(artifact.kv_groups)
    left = [kv_available(each, config(each), groups, 1 << 30, "GPU") for each in (plain, artifact)]
    assert left[0] - left[1] == WORKSPACE_BYTES


def test_all_that_is_taken_was_planned_for(pair: Pair) -> None:
    held = footprint(pair.artifact, 96, 4)
    pool = pair.runner.num_blocks[0] * pair.artifact.block_size * pair.artifact.kv_bytes_per_token
    sizes = [memory.size for memory in pair.fake.device.values()]
    assert WORKSPACE_BYTES in sizes
    assert sum(-(-size // PAGE) * PAGE for size in sizes) <= held.fixed + -(-pool // PAGE) * PAGE


def test_a_step_gives_a_product_one_call(pair: Pair) -> None:
    """A product is one call, with another one before it only if its number of rows differs from the last."""
    assert pair.library is not None
    plan = make_plan([(0, PROMPT, 0)])
    pair.run(plan)
    before, launched = pair.library.calls.copy(), pair.fake.calls.copy()
    pair.run(plan)
    assert set(pair.library.calls - before) <= {"cublasLtMatmul", "cublasLtMatrixLayoutSetAttribute"}
    assert "cuMemAlloc" not in pair.fake.calls - launched
