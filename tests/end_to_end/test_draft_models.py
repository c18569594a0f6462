"""Draft models of a padded vocabulary, after a preemption, and in memory that is shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from random_models import make_random_model
from speculated import always_draft

from inferc import InfercError, SamplingParams, StructuredOutputs
from inferc.compiler.build import compile
from inferc.config import CompileConfig
from inferc.runtime.engine.engine import Engine
from inferc.runtime.engine.load import load_engine
from inferc.runtime.speculation.draft_model import ModelDrafter
from inferc.runtime.speculation.forced import ForcedDrafter


def test_a_draft_model_with_more_rows_than_the_large_one(tiny_artifact: Path, tmp_path: Path) -> None:
    """Ids that only the draft model has, whose logits are padded to a rounder number, end no engine."""
    make_random_model("llama", tmp_path / "model", num_hidden_layers=1, hidden_size=32, vocab_size=512)
    compile(tmp_path / "model", tmp_path / "out", CompileConfig(certify="none"))
    engine = load_engine(tiny_artifact, num_threads=1, speculate=f"draft:{tmp_path / 'out'}")
    always_draft(engine)
    engine.add_request("x", [5, 6, 7], SamplingParams(max_tokens=40, ignore_eos=True, temperature=0))
    count = 0
    while engine.has_work:
        count += sum(len(output.token_ids) for output in engine.step())
    engine.close()
    assert count == 40


def test_a_sequence_that_comes_back_to_its_slot_has_no_k_and_v_there(tiny_artifact: Path) -> None:
    """A model that drafts for itself is right also after a preemption by a request that drafts nothing."""
    engine = load_engine(
        tiny_artifact, num_threads=1, max_num_seqs=1, policy="priority", speculate=f"draft:{tiny_artifact}"
    )
    always_draft(engine)

    def steps(count: int) -> None:
        for _ in range(count):
            if engine.has_work:
                engine.step()

    low = SamplingParams(max_tokens=120, ignore_eos=True, temperature=0)
    high = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0, priority=1)
    engine.add_request("low", list(range(20, 90)), low)
    steps(4)
    for number in range(3):
        engine.add_request(f"high {number}", list(range(100 + number, 180)), high)
        steps(6)
    steps(1000)
    stats = engine.stats()
    engine.close()
    assert stats.num_preemptions >= 2 and stats.num_accepted == stats.num_drafted


def test_both_models_have_room_in_memory_of_no_given_size(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what is free is for the K and V of both."""
    monkeypatch.setattr("inferc.config.available_memory_bytes", lambda: 1_000_000)
    counts = []
    for speculate in ("none", f"draft:{tiny_artifact}"):
        engine = load_engine(tiny_artifact, num_threads=1, max_num_seqs=64, speculate=speculate)
        counts.append(engine.scheduler.config.num_blocks[0])
        engine.close()
    assert counts[1] == counts[0] // 2 > 1


def test_a_draft_model_that_breaks_costs_no_answer(tiny_artifact: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The place in the grammar of a sequence that is held to a form stays where it is, in the middle of a draft."""
    form = StructuredOutputs(regex=r"[a-z]{30,40}-\d{4}")
    params = SamplingParams(max_tokens=50, temperature=0, structured_outputs=form)

    def answer(engine: Engine) -> list[int]:
        engine.add_request("x", [5, 6, 7], params)
        found: list[int] = []
        while engine.has_work:
            for output in engine.step():
                found += output.token_ids
        engine.close()
        return found

    expected = answer(load_engine(tiny_artifact, num_threads=1, max_num_seqs=1))
    engine = load_engine(tiny_artifact, num_threads=1, max_num_seqs=1, speculate=f"draft:{tiny_artifact}")
    always_draft(engine)
    assert engine.speculation is not None and isinstance(engine.speculation.drafter, ForcedDrafter)
    drafter = engine.speculation.drafter._other
    assert isinstance(drafter, ModelDrafter)
    run, calls = drafter._run, []

    def breaks(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 12:
            raise InfercError("the draft model broke")
        return run(*args)

    drafter._run = breaks  # type: ignore[assignment, method-assign]
    assert answer(engine) == expected and len(expected) > 20
    assert len(calls) == 12 and "answers go on without" in caplog.text
