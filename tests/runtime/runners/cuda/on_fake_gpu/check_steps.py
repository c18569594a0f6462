"""Steps of the CUDA runner: the reference's logits, ids and scores, as graphs and launch by launch."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from fake_gpu import OTHER, PROMPT, TOLERANCE, Pair, opened, plans
from lowered import make_plan

from inferc.errors import RequestError
from inferc.runtime.runners.cuda import footprint, shared_prefixes
from inferc.runtime.runners.cuda.capacity import Capacity, buckets
from inferc.runtime.runners.cuda.launches import Part
from inferc.runtime.step.plan import StepPlan


@pytest.fixture(scope="module")
def llama() -> Iterator[Pair]:
    with opened("llama") as made:
        yield made


@pytest.mark.slow
def test_in_the_invariant_order_it_has_them_however_its_prompt_is_cut() -> None:
    """Whole, as after a preemption, and in chunks and token by token, as before it, a prompt gives the same logits."""
    tokens, found = (PROMPT * 11)[:95], []
    for ends in ([95], [7, 70, 94, 95]):
        with opened("llama", deterministic=True) as made:
            for begin, end in pairwise([0, *ends]):
                logits = made.logits(make_plan([(0, tokens[begin:end], begin)]))
            found.append(logits.tobytes())
    assert found[0] == found[1]


def sharing(plan: StepPlan, blocks: int) -> StepPlan:
    """The first blocks of slots 0, 1 and 2 are those of slot 0."""
    table = plan.block_tables[0]
    table[plan.seq_slots < 3, :blocks] = 1 + np.arange(blocks)
    return plan


@pytest.mark.slow
def test_a_prefix_is_read_once_for_those_that_share_it(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefixes, "LEAST_SAVED_BYTES", 1)
    prompts = [(0, (OTHER * 3)[:80], 0), (1, [1, 2, 3], 64), (2, [9], 64), (3, PROMPT, 0)]
    for prompt in prompts:
        plan = sharing(make_plan([prompt]), 2)
        llama.run(plan)
        llama.expected(plan)
    launches = {}
    for seqs in ([(0, [5], 80), (3, [8], 9)], [(3, [8], 9), (2, [7], 65), (0, [5], 80), (1, [6], 67)]):
        plan = sharing(make_plan(seqs), 2)
        before = llama.fake.calls["cuLaunchKernelEx"]
        found, expected = llama.logits(plan), llama.oracle._logits(plan)
        launches[len(seqs)] = llama.fake.calls["cuLaunchKernelEx"] - before
        assert np.abs(found - expected).max() <= TOLERANCE["llama"] * np.abs(expected).max()
        before = llama.fake.calls["cuGraphLaunch"]
        assert llama.run(plan).token_ids.tolist() == llama.expected(plan).token_ids.tolist()
        assert llama.fake.calls["cuGraphLaunch"] == before + 1
    layers = llama.artifact.kv_groups[0].layers
    assert launches[4] - launches[2] == len(layers) + 1, "one in each layer, and what shares out its keys"


@pytest.mark.slow
def test_many_rows_at_once(llama: Pair) -> None:
    """More rows of logits than there is memory for at a time."""
    plan = make_plan([(0, OTHER, 0), (1, PROMPT * 6, 0)], all_rows=True)
    assert len(plan.logits_rows) > 64
    assert llama.run(plan).token_ids.tolist() == llama.expected(plan).token_ids.tolist()


def test_a_step_is_given_before_the_ids_of_the_last_are_there(llama: Pair) -> None:
    first = make_plan([(0, PROMPT, 0), (1, OTHER[:4], 0)])
    second = make_plan([(0, [0], 9), (1, [0], 4)])
    second.pending_rows, second.pending_slots = np.array([0, 1], np.int32), np.array([0, 1], np.int32)
    third = make_plan([(1, [0], 5)])
    third.pending_rows, third.pending_slots = np.array([0], np.int32), np.array([1], np.int32)
    expected = [llama.expected(plan).token_ids.tolist() for plan in (first, second, third)]
    llama.runner.submit(first)
    llama.runner.submit(second)
    found = [llama.runner.wait().token_ids.tolist()]
    llama.runner.submit(third)
    found += [llama.runner.wait().token_ids.tolist() for _ in range(2)]
    assert found == expected


def test_scores_are_the_references(llama: Pair) -> None:
    plan = make_plan([(3, OTHER, 0)], all_rows=True)
    targets = np.array([*OTHER[1:], 7], np.int32)
    (found, best), (expected, likely) = llama.runner.score(plan, targets), llama.oracle.score(plan, targets)
    assert best.tolist() == likely.tolist()
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_decode_gives_the_driver_little_to_do(llama: Pair) -> None:
    """A copy in, a graph, a copy out and an event."""
    plan = make_plan([(0, [3], 35), (1, [4], 10)])
    llama.run(plan)
    before = llama.fake.calls.copy()
    llama.run(plan)
    calls = llama.fake.calls - before
    once = ("cuMemcpyHtoDAsync", "cuGraphLaunch", "cuMemcpyDtoHAsync", "cuEventRecord", "cuEventSynchronize")
    assert dict(calls) == dict.fromkeys(once, 1)


def without_graphs(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "no memory for a CUDA graph" in record.message]


@pytest.mark.slow
def test_a_step_whose_graph_finds_no_memory_runs_without(caplog: pytest.LogCaptureFixture) -> None:
    with opened("llama", max_graphs=2) as made:
        assert made.fake.calls["cuGraphInstantiateWithFlags"] == 3
        for plan in (*plans(), make_plan([(2, [5], 36), (0, [6], 11), (1, [4], 3)])):
            assert made.run(plan).token_ids.tolist() == made.expected(plan).token_ids.tolist()
        assert made.fake.calls["cuGraphLaunch"] == 0, "the steps are of three sequences"
        assert made.fake.calls["cuGraphInstantiateWithFlags"] == 3, "it is tried once"
    (message,) = without_graphs(caplog)
    assert "steps of 4 sequences" in message
    assert message.endswith("run kernel by kernel, which is slower; a lower --kv-memory leaves them more")


@pytest.mark.slow
def test_a_graph_that_finds_no_memory_at_its_launch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened("llama") as made:
        monkeypatch.setattr(made.fake, "cuGraphLaunch", lambda *_: 2, raising=False)
        for plan in plans():
            assert made.run(plan).token_ids.tolist() == made.expected(plan).token_ids.tolist()
        with pytest.raises(ValueError, match="no graph for a bucket of 4"):
            made.runner.step_ms(4)
    assert len(without_graphs(caplog)) == 1


PARTS: tuple[Part, ...] = ("whole", "compute", "sample")


@pytest.mark.parametrize("deterministic", [False, True])
def test_memory_is_planned_for_every_graph(deterministic: bool) -> None:
    with opened("llama", deterministic=deterministic) as made:
        for size in buckets(4):
            for shares in (False, True) if made.runner._inputs.sharing else (False,):
                for part in PARTS:
                    assert made.runner._graphs.find(Capacity(size, size, size), shares, part) is not None
        planned = footprint.footprint(made.artifact, 96, 4, deterministic).graphs
        assert sum(map(len, made.fake.graphs())) * footprint.GRAPH_LAUNCH_BYTES == planned


def test_blocks_pass_through_their_canonical_form(llama: Pair) -> None:
    size = llama.artifact.block_size
    plan = make_plan([(0, PROMPT, 0)])
    llama.run(plan)
    llama.oracle._logits(plan)
    block = plan.block_tables[0][0, :1]
    packed = llama.runner.pack_blocks(0, block)
    canonical = llama.oracle._caches[0][block.tolist()].numpy()
    np.testing.assert_allclose(packed[:, :, :, : len(PROMPT)], canonical[:, :, :, : len(PROMPT)], rtol=1e-5, atol=1e-5)
    llama.runner.unpack_blocks(0, block + 20, packed)
    assert llama.runner.pack_blocks(0, block + 20).tobytes() == packed.tobytes()
    begin = np.arange(4, dtype=np.int64)
    llama.runner.copy_slots(0, size * int(block[0]) + begin, size * int(block[0] + 21) + begin[::-1])
    moved = llama.runner.pack_blocks(0, block + 21)
    assert moved[:, :, :, :4].tobytes() == packed[:, :, :, 3::-1].tobytes()


def test_a_plan_out_of_bounds_is_refused(llama: Pair) -> None:
    with pytest.raises(RequestError, match="num_seqs 5 is out of range"):
        llama.runner.submit(make_plan([(slot % 4, [1], 0) for slot in range(5)]))


def test_a_step_that_the_gpu_fails_answers_and_closing_does_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened("llama", checked=False) as made:
        monkeypatch.setattr(made.fake, "cuEventSynchronize", lambda *_: 700, raising=False)
        monkeypatch.setattr(made.fake, "cuStreamSynchronize", lambda *_: 700, raising=False)
        made.runner.submit(make_plan([(0, PROMPT, 0)]))
        assert made.runner.wait().error == "cuEventSynchronize failed with CUDA error 700: an error"
        made.runner.close()
