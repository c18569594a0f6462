"""The ladder: the same tokens on every rung, what its rows say, and the places in the KV cache that it counts."""

from pathlib import Path

import burst
import ladder
import ladder_report
import pytest
import tables
from burst import KVUse, Request

from inferc.runtime.engine.load import load_engine
from inferc.runtime.simulate.trace import Trace, TraceRequest

REQUESTS = burst.workload(5, 300, scale=0.1)


def test_the_workload_is_mixed_and_half_of_it_shares_a_prompt() -> None:
    requests = burst.workload(40, 4096)
    assert requests == burst.workload(40, 4096)
    behind = [each.prompt[:512] for each in requests[1::2]]
    assert all(each == behind[0] for each in behind) and requests[0].prompt[:16] != behind[0][:16]
    outputs = sorted(each.output_len for each in requests)
    assert outputs[0] >= 16 and outputs[-1] <= 224 and outputs[-1] > 2 * outputs[len(outputs) // 2]
    assert burst.lengths(requests)["requests"] == 40


@pytest.mark.slow
def test_all_rungs_give_the_same_tokens(tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "measure_read", lambda threads: 1e9)
    chosen = ladder.rungs(REQUESTS, 2, 256, "w8a8")
    runs: list[int] = []
    paths = {"bfloat16": tiny_artifact, "w8a8": tiny_artifact}
    climbs, reads = ladder.climb_all(paths, chosen, REQUESTS, 1, lambda: runs.append(1))
    assert len(runs) == 2 * len(chosen) and reads == [1e9]
    assert [len(answer) for answer in climbs[0].answers] == [each.output_len for each in REQUESTS]
    assert all(climb.answers == climbs[0].answers for climb in climbs), "here the weights are all the same"
    rows = ladder.rows(climbs, REQUESTS)
    first, cached, continuous, paged, *_, last = rows
    assert first["computed_tokens"] == sum(
        len(each.prompt) + done for each in REQUESTS for done in range(each.output_len)
    )
    assert cached["computed_tokens"] == sum(each.length - 1 for each in REQUESTS) > last["computed_tokens"]
    assert cached["expected_over_before"] == first["computed_tokens"] / cached["computed_tokens"]
    assert cached["steps"] > continuous["steps"] > paged["steps"]
    assert continuous["seqs_at_once"] <= 2 < paged["seqs_at_once"]
    lengths = burst.lengths(REQUESTS)
    facts = {"parameters": 1e5, "max_model_len": 256, "threads": 2, "workload": lengths, "rungs": rows}
    grid, memory = ladder_report.tables(facts)
    assert len(grid) == 8 and len(memory) == 2 and "| + paging |" in tables.markdown(grid)
    facts["trace"] = {**lengths, "max_model_len": 512, "kv_unused": 0.004, "kv_unused_if_reserved": 0.5}
    assert len(ladder_report.tables(facts)[1]) == 3
    ladder_report.draw(facts, tmp_path / "ladder.png")
    assert (tmp_path / "ladder.png").read_bytes()[:4] == b"\x89PNG"


def test_other_tokens_fail_the_run(tiny_artifact: Path) -> None:
    climbs = [ladder.start(rung, tiny_artifact) for rung in ladder.rungs(REQUESTS, 2, 256, "w8a8")]
    for climb in climbs:
        climb.engine.close()
        climb.answers = [[1, 2], [3]]
    climbs[-1].answers = [[1, 2], [4]]
    with pytest.raises(SystemExit, match=r"'\+ prefix cache' gives other tokens than '.*w8a8.*', .* in requests 1$"):
        ladder.check_tokens(climbs)
    climbs[-2].answers = climbs[-1].answers
    ladder.check_tokens(climbs)


def test_the_places_of_a_sequence_are_counted(tiny_artifact: Path) -> None:
    engine = load_engine(tiny_artifact, max_num_seqs=2, prefix_cache=False, pipeline=False)
    uses: list[KVUse] = []

    def look() -> None:
        uses.append(KVUse())
        uses[-1].add(engine.scheduler)

    burst.generate(engine, [Request([5] * 31, 4)], after_step=look)
    engine.close()
    # One block of 32, two as soon as it is full; at last nobody runs.
    assert [(use.needed, use.held) for use in uses] == [(32, 32), (32, 32), (34, 64), (0, 0)]
    assert uses[2].reserved == 256 and uses[2].unused_of_blocks == pytest.approx(30 / 64)
    assert uses[1].seqs_at_once == 1 and uses[3].num_steps == 0


def test_long_sequences_leave_little_unused() -> None:
    trace = Trace(tuple(TraceRequest(0.0, 3000 + 7 * i, 30, ()) for i in range(20)))
    found = burst.use_on_trace(trace, 32)
    assert found["max_model_len"] == 3163 and found["requests"] == 20
    assert 0 < found["kv_unused"] < 0.01 < found["kv_unused_if_reserved"] < 0.2
