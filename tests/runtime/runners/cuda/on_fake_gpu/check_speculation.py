"""Speculation on a GPU: with any drafts, the tokens of every answer are those that it has without."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_cuda import FakeCuda
from fake_gpu import ARTIFACTS, OTHER, PROMPT
from speculated import FORMS, Asked, Machines, always_draft

from inferc import LLM, SamplingParams, StructuredOutputs
from inferc.errors import ConfigError
from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.engine.load import load_engine
from inferc.runtime.runners.cuda import driver, footprint
from inferc.runtime.speculation.forced import ForcedDrafter

LLAMA = ARTIFACTS / "llama"
VARIANTS: tuple[dict[str, Any], ...] = (
    {"max_num_batched_tokens": 64},
    {"max_num_batched_tokens": 12, "max_num_seqs": 4, "prefix_cache": False},
)
ASKED = [
    Asked("repeats", "regex", "penalized", "logprobs", 8),
    Asked("short", "free", "penalized greedy", "plain", 6),
    Asked("short", "free", "greedy", "logprobs", 8),
    Asked("repeats", "schema", "seeded", "logprobs", 12),
]
MEMORY: dict[str, Any] = {"kv_memory_bytes": 4 << 20, "deterministic": True}


def use(monkeypatch: pytest.MonkeyPatch, path: Path = LLAMA, total_bytes: int = 1 << 32) -> FakeCuda:
    fake = FakeCuda(path, total_bytes=total_bytes)
    monkeypatch.setattr(driver, "open_library", lambda: fake)
    return fake


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with pytest.MonkeyPatch.context() as patch:
        fake = use(patch)
        made = Machines(LLAMA, VARIANTS, **MEMORY)
        yield made
        fake.check()
        made.close()
        assert not fake.device and not fake.host


@pytest.mark.parametrize(
    ("variant", "right", "count"),
    [
        (0, 0.8, 1),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((0, 0.9, 4), (1, 0.5, 4))),
    ],
)
def test_answers_are_the_same_with_any_drafts(machines: Machines, variant: int, right: float, count: int) -> None:
    """Greedy and seeded, with penalties, free and held to a form, cached or not, and in chunks."""
    asked = ASKED[:count]
    expected = [machines.alone(each) for each in asked]
    machines.drafter.random.seed(variant)
    machines.drafter.right = right
    assert machines.together(variant, asked, [0, 1, 0, 2][:count]) == expected
    assert machines.engines[variant].stats().num_drafted > 0


def test_a_model_that_drafts_for_itself_is_always_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both runners live in one process, on one GPU, and are held to the same form."""
    fake = use(monkeypatch)
    options: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "deterministic": True}
    prompts = [PROMPT, OTHER[:12]]
    params = [
        SamplingParams(max_tokens=6, ignore_eos=True, seed=3),
        SamplingParams(max_tokens=6, temperature=0, structured_outputs=StructuredOutputs.of(FORMS["regex"] or {})),
    ]
    answers = []
    for speculate in ("none", f"draft:{LLAMA}"):
        with LLM(LLAMA, speculate=speculate, kv_memory_bytes=4 << 20, **options) as llm:
            if speculate != "none":
                speculation = always_draft(llm)
                assert isinstance(speculation.drafter, ForcedDrafter) and speculation.drafter._other is not None
                speculation.drafter = speculation.drafter._other  # without what forms force, whose spelling is a guess
            answers.append([one.outputs[0].token_ids for one in llm.generate(prompts, params)])
            stats = llm.stats()
    assert answers[0] == answers[1]
    assert stats.num_drafted >= 6 and stats.num_accepted == stats.num_drafted
    fake.check()
    assert not fake.device and not fake.host


@pytest.mark.parametrize("memory", [64, None])
def test_the_memory_is_shared_with_the_draft_model(monkeypatch: pytest.MonkeyPatch, memory: int | None) -> None:
    """Both models have as many blocks, in the memory that is asked for, or in all that is left."""
    artifact = load_artifact(LLAMA)
    block_bytes = artifact.block_size * artifact.kv_bytes_per_token
    fixed = footprint.footprint(artifact, 512, 64).fixed
    fake = use(monkeypatch, total_bytes=2 * fixed + 200 * block_bytes)
    options: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 512}
    if memory is not None:
        options["kv_memory_bytes"] = memory * block_bytes
    engine = load_engine(LLAMA, speculate=f"draft:{LLAMA}", **options)
    (count,) = engine.scheduler.config.num_blocks
    assert count == (memory or 200) // 2
    engine.close()
    assert not fake.device and not fake.host


def test_a_draft_model_that_finds_no_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = footprint.footprint(load_artifact(LLAMA), 512, 4).fixed
    fake = use(monkeypatch, total_bytes=2 * fixed - 1)
    with pytest.raises(ConfigError, match="out of device memory: Fake GPU beside the draft model has .* GB free"):
        load_engine(LLAMA, speculate=f"draft:{LLAMA}", max_num_seqs=4, max_num_batched_tokens=512)
    assert not fake.device and not fake.host
