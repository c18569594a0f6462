"""The KV cache's offload tier with a GPU: blocks come down beside the steps, and steps copy up what they need."""

from pathlib import Path
from typing import Any

import pytest
from fake_cuda import FakeCuda
from fake_gpu import ARTIFACTS, OTHER, PROMPT
from run_together import run_together

from inferc.runtime.engine.engine import Engine
from inferc.runtime.engine.load import load_engine
from inferc.runtime.runners.cuda import driver
from inferc.runtime.step.cost import WORK
from inferc.runtime.step.sampling_params import SamplingParams

LONG = OTHER * 2 + PROMPT


def opened(
    monkeypatch: pytest.MonkeyPatch, folder: Path | None, num_blocks: int, **options: Any
) -> tuple[Engine, FakeCuda]:
    fake = FakeCuda(ARTIFACTS / "llama")
    monkeypatch.setattr(driver, "open_library", lambda: fake)
    disk: dict[str, Any] = {} if folder is None else {"kv_disk": str(folder), "kv_disk_bytes": 1 << 20}
    sizes: dict[str, Any] = {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 96,
        "kv_memory_bytes": num_blocks * block_bytes(),
    }
    return load_engine(ARTIFACTS / "llama", deterministic=True, **sizes, **disk, **options), fake


def block_bytes() -> int:
    from inferc.runtime.artifact.load import load_artifact

    artifact = load_artifact(ARTIFACTS / "llama")
    return artifact.block_size * artifact.kv_bytes_per_token


def closed(engine: Engine, fake: FakeCuda) -> None:
    fake.check()
    engine.close()
    assert not fake.device and not fake.host


@pytest.mark.slow
def test_a_later_run_copies_up_what_was_stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine, fake = opened(monkeypatch, None, 20)
    (expected,) = run_together(engine, [LONG], 3)
    closed(engine, fake)
    engine, fake = opened(monkeypatch, tmp_path, 20)
    assert run_together(engine, [LONG], 3) == [expected]
    size = engine.scheduler.cache.block_size
    stored = (len(LONG) + 2) // size
    closed(engine, fake)
    engine, fake = opened(monkeypatch, tmp_path, 20)
    assert run_together(engine, [LONG], 3) == [expected]
    stats = engine.stats()
    assert stats.num_loaded == (len(LONG) - 1) // size > 0 and stats.num_damaged == 0
    assert stats.cached_tokens == stats.num_loaded * size
    assert stored >= stats.num_loaded
    closed(engine, fake)


@pytest.mark.slow
def test_what_was_preempted_or_made_room_is_found_below(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prompts, num_new = [OTHER[:31], [*OTHER[:29], 3, 4]], 6
    alone = []
    for prompt in prompts:
        engine, fake = opened(monkeypatch, None, 20)
        alone += run_together(engine, [prompt], num_new)
        closed(engine, fake)
    size = engine.scheduler.cache.block_size
    blocks = 1 + 2 * -(-31 // size) + 1  # one of the two needs another block, and so does the other
    engine, fake = opened(monkeypatch, tmp_path, blocks, overcommit=True)
    # Of a machine on which to compute is dear: whoever is preempted is swapped.
    engine.scheduler.forecast.cost.set_prices(dict.fromkeys(WORK, 1.0))
    assert run_together(engine, prompts, num_new) == alone
    stats = engine.stats()
    assert stats.num_preemptions > 0 and stats.num_swapped > 0
    run_together(engine, [LONG], 2)  # takes all blocks
    assert run_together(engine, [prompts[1] + alone[1][:4]], 2) == [alone[1][4:]]
    assert engine.stats().num_loaded > stats.num_loaded
    closed(engine, fake)


@pytest.mark.slow
def test_what_two_sequences_share_of_a_block_is_copied_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def bits(prompt: list[int]) -> list[tuple[int, float]]:
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=0)
        engine.add_request("a", prompt, params)
        found = []
        while engine.has_work:
            rows = [row for output in engine.step() for row in output.logprobs or []]
            found += [(row.token_id, row.logprob) for row in rows]
            engine.scheduler.check_integrity()
        return found

    engine, fake = opened(monkeypatch, None, 20, prefix_cache=False)
    size = engine.scheduler.cache.block_size
    shared = size + size // 2 + 1  # a block, and more than half of the next
    second = [*LONG[:shared], *(token % 7 for token in LONG[shared : shared + 5])]
    assert len(LONG) > 2 * size and second[shared] != LONG[shared]
    expected = bits(second)
    closed(engine, fake)
    engine, fake = opened(monkeypatch, None, 20)
    bits(LONG)
    before = fake.calls["cuMemcpyDtoDAsync"]
    assert bits(second) == expected and len(expected) == 3, "where nothing was copied is NaN"
    assert engine.stats().cached_tokens == shared and fake.calls["cuMemcpyDtoDAsync"] == before + 1
    closed(engine, fake)
