"""The reference target answers as the compiled one does: greedy, sampled, with penalties, bias and masks, scored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from inferc import LLM, CompileConfig, SamplingParams, compile
from inferc.errors import UnsupportedError

PROMPTS = ["def add(first", "for name in", "The quick brown fox"]
CASES = {
    "greedy": SamplingParams(temperature=0, max_tokens=12, logprobs=3),
    "temperature": SamplingParams(temperature=1.5, seed=1, max_tokens=12),
    "top_k": SamplingParams(top_k=5, seed=2, max_tokens=12),
    "top_p": SamplingParams(top_p=0.5, seed=3, max_tokens=12),
    "min_p": SamplingParams(min_p=0.3, seed=4, max_tokens=12),
    "all": SamplingParams(top_k=40, top_p=0.9, min_p=0.05, temperature=0.7, seed=5, max_tokens=12),
    "typical_p": SamplingParams(typical_p=0.6, seed=8, max_tokens=12),
    "xtc": SamplingParams(xtc_probability=0.5, xtc_threshold=0.01, temperature=0.8, seed=9, max_tokens=12),
    "penalties": SamplingParams(
        temperature=0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7, max_tokens=12
    ),
    "bias": SamplingParams(temperature=0, logit_bias={7: 50.0, 9: 49.0}, frequency_penalty=2.0, max_tokens=12),
    "allowed": SamplingParams(temperature=2.0, allowed_token_ids=(30, 10, 20), seed=6, max_tokens=12),
    "banned": SamplingParams(temperature=1.0, banned_token_ids=tuple(range(0, 320, 2)), seed=7, max_tokens=12),
    "min_tokens": SamplingParams(temperature=0, allowed_token_ids=(1, 30), min_tokens=4, max_tokens=12),
}


@pytest.fixture(scope="module")
def folder(tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("artifacts") / "reference"
    compile(tiny_llama_folder, out, CompileConfig(target="reference", certify="none"))
    return out


@pytest.fixture(scope="module")
def reference(folder: Path) -> Iterator[LLM]:
    with LLM(folder, max_num_seqs=4) as llm:
        yield llm


@pytest.fixture(scope="module")
def compiled(tiny_artifact: Path) -> Iterator[LLM]:
    with LLM(tiny_artifact, max_num_seqs=4, num_threads=1) as llm:
        yield llm


def test_attention_is_not_counted(folder: Path) -> None:
    with pytest.raises(
        UnsupportedError,
        match="--kv-evict .* for target reference, which runs on the ops' references: it does not count attention",
    ):
        LLM(folder, kv_evict="heavy-hitters:64")


@pytest.mark.parametrize("case", CASES)
def test_generating(reference: LLM, compiled: LLM, case: str) -> None:
    expected = [answer.outputs[0] for answer in reference.generate(PROMPTS, CASES[case])]
    found = [answer.outputs[0] for answer in compiled.generate(PROMPTS, CASES[case])]
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    for one, other in zip(found, expected, strict=True):
        for entry, want in zip(one.logprobs or [], other.logprobs or [], strict=True):
            assert (entry.token_id, entry.rank) == (want.token_id, want.rank)
            assert [value for _, value in entry.top] == pytest.approx([value for _, value in want.top], abs=1e-4)


def test_min_tokens_holds_the_end_back(compiled: LLM) -> None:
    output = compiled.generate(PROMPTS[0], CASES["min_tokens"])[0].outputs[0]
    assert 1 not in output.token_ids[:4]


def test_banned_tokens_never_come(compiled: LLM) -> None:
    output = compiled.generate(PROMPTS[0], CASES["banned"])[0].outputs[0]
    assert all(token % 2 for token in output.token_ids)


def test_scoring(reference: LLM, compiled: LLM) -> None:
    found, expected = compiled.score(PROMPTS[2]), reference.score(PROMPTS[2])
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert found.argmax == expected.argmax
