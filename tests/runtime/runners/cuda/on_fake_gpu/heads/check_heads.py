"""Heads on a fake GPU: they draft what their description says, from rows that never leave the device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from eagle_heads import HeadOracle, states_of
from fake_cuda import FakeCuda
from fake_gpu import ARTIFACTS, MODELS
from head_runs import Drafted, drafter_of, run, watched
from speculated import Asked, answer

from inferc.arena import round_up
from inferc.errors import ConfigError
from inferc.frontend.checkpoint.load import load
from inferc.frontend.reference import reference_greedy, reference_model
from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.engine.engine import Engine
from inferc.runtime.engine.load import load_engine
from inferc.runtime.runners.cuda import driver, footprint, head_rows

MODEL, LAYERS = ARTIFACTS / "model", (1, 2)
OPTIONS: dict[str, Any] = {
    "max_num_seqs": 3,
    "max_num_batched_tokens": 64,
    "kv_memory_bytes": 1 << 20,
    "deterministic": True,
    "speculate_tokens": 3,
}
FIRST, SECOND = list(range(20, 56)), [5, 6, 7, 200, 201]


def machine(monkeypatch: pytest.MonkeyPatch, total_bytes: int = 1 << 32) -> FakeCuda:
    made = FakeCuda(ARTIFACTS / "cuda", total_bytes=total_bytes)
    for kind in MODELS:
        made.know_all(ARTIFACTS / f"cuda-{kind}")
    monkeypatch.setattr(driver, "open_library", lambda: made)
    return made


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    made = machine(monkeypatch)
    yield made
    made.check()
    assert not made.device and not made.host


def opened(kind: str = "", **options: Any) -> Engine:
    """Return an engine of the model, with a head of that kind or alone."""
    speculate = f"eagle3:{ARTIFACTS / f'cuda-{kind}'}" if kind else "none"
    return load_engine(ARTIFACTS / "cuda", speculate=speculate, **{**OPTIONS, **options})


@cache
def transformers_model() -> Any:
    return reference_model(load(MODEL), "float32")


def answers(*prompts: list[int], count: int) -> list[list[int]]:
    """Return what the model answers, by transformers."""
    return [reference_greedy(transformers_model(), prompt, count) for prompt in prompts]


def check(kind: str, drafted: list[Drafted]) -> None:
    """Compare drafts with those of the description, by the rows of transformers' model."""
    model = transformers_model()
    oracle = HeadOracle.of(ARTIFACTS / kind, model.get_input_embeddings().weight)
    assert sum(len(each.ids) > 1 for each in drafted) >= 3
    for each in drafted:
        states = states_of(model, each.tokens[:-1], LAYERS)
        assert each.ids == oracle.draft(each.tokens, states, len(each.ids))[0]


def close(engine: Engine) -> None:
    """Close an engine; its rows are free again when its drafter is gone."""
    store = engine.runner.row_store  # type: ignore[attr-defined]
    assert min(store.num_free) > 0
    engine.close()
    drafter_of(engine).__dict__.clear()
    assert store.num_free == (store.num_given, store.num_own)


def test_a_head_drafts_what_its_description_says(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """One prompt has a block that the head computes as soon as it is complete, and which is found again."""
    copied: list[int] = []
    copy_out = driver.Driver.copy_out

    def noted(self: driver.Driver, target: int, address: int, num_bytes: int, stream: Any) -> None:
        copied.append(num_bytes)
        copy_out(self, target, address, num_bytes, stream)

    expected = answers(FIRST, SECOND, count=7)
    monkeypatch.setattr(driver.Driver, "copy_out", noted)
    engine = opened("trained")
    drafted = watched(engine)
    assert run(engine, [FIRST, SECOND], 7) == expected
    run(engine, [[*FIRST[:32], 3, 4]], 3)
    stats = engine.stats()
    close(engine)
    assert stats.cached_tokens == 32 and stats.num_accepted >= 3
    assert fake.calls["cuGraphLaunch"] > 3, "steps of the head behind its first are graphs"
    row_bytes = head_rows.row_bytes(load_artifact(ARTIFACTS / "cuda-trained").program)
    assert row_bytes == (2 * 64 * 4, 64 * 4) and max(copied) < min(row_bytes), "rows stay on the device"
    check("trained", drafted)


ASKED = {
    "form": Asked("repeats", "regex", "seeded", "logprobs", 8),
    "free": Asked("short", "free", "penalized", "plain", 6),
    "long": Asked("long", "free", "narrowed", "plain", 3),
}


@pytest.mark.parametrize(
    ("names", "options"),
    [
        pytest.param(("form",), {}, marks=pytest.mark.slow),
        pytest.param(("free", "long"), {"max_num_batched_tokens": 12}, marks=pytest.mark.slow),
        pytest.param(("free", "long"), {"prefix_cache": False}, marks=pytest.mark.slow),
    ],
)
def test_answers_are_the_same_as_without(fake: FakeCuda, names: tuple[str, ...], options: dict[str, Any]) -> None:
    """Seeded, with penalties, in chunks, and held to a form of which the head lacks some tokens."""
    asked, found = {name: ASKED[name] for name in names}, []
    for kind in ("", "trained"):
        engine = opened(kind, **options)
        drafted = watched(engine) if kind else []
        found.append(answer(engine, asked, {"free": 2}))
        (close if kind else Engine.close)(engine)
    assert found[0] == found[1] and drafted


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"deterministic": False}, {"max_num_batched_tokens": 12}], ids=str)
def test_other_heads_and_the_fast_order(fake: FakeCuda, options: dict[str, Any]) -> None:
    engine = opened("normed", **options)
    drafted = watched(engine)
    run(engine, [FIRST, SECOND], 5)
    run(engine, [[*FIRST[:32], 3, 4]], 3)
    assert engine.stats().cached_tokens == 32
    close(engine)
    check("normed", drafted)


def test_a_store_that_is_full_ends_the_drafts_and_no_answer(fake: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    engine = opened("trained")
    drafted = watched(engine)
    store = engine.runner.row_store  # type: ignore[attr-defined]
    held = store.take(store.num_given - 6, False)
    assert run(engine, [SECOND], 3) == answers(SECOND, count=3) and len(drafted) == 1
    assert held is not None and "answers go on without" in caplog.text
    del held
    close(engine)


@pytest.mark.parametrize("memory", [16, None])
def test_the_memory_is_shared_with_the_head(monkeypatch: pytest.MonkeyPatch, memory: int | None) -> None:
    """Both have as many blocks, in the memory that is asked for, or in all that the head's weights and rows leave."""
    model, head = (load_artifact(ARTIFACTS / name) for name in ("cuda", "cuda-trained"))
    of_model, of_head = (each.block_size * each.kv_bytes_per_token for each in (model, head))
    fixed = footprint.footprint(model, 64, 3).fixed + footprint.footprint(head, 512, 3).fixed
    given, _ = head_rows.row_bytes(head.program) or (0, 0)
    rows = round_up(head_rows.most_given(64, 3, model.block_size) * given, footprint.PAGE)
    fake = machine(monkeypatch, total_bytes=fixed + rows + 20 * (of_model + of_head + given))
    options = {"kv_memory_bytes": "auto" if memory is None else memory * (of_model + of_head)}
    engine = opened("trained", deterministic=False, **options)
    assert engine.scheduler.config.num_blocks == ((memory or 20),)
    store = engine.runner.row_store  # type: ignore[attr-defined]
    assert (store.num_given, store.num_own) == (2 * 64 + 3 * 33 + (memory or 20), 2 * 512)
    engine.close()
    assert not fake.device and not fake.host
    small = machine(monkeypatch, total_bytes=fixed + rows)
    with pytest.raises(ConfigError, match="out of device memory: Fake GPU beside the draft model has .* GB free"):
        opened("trained", deterministic=False)
    assert not small.device and not small.host
