"""`inferc.LLM` on a real artifact: a random float32 Llama, compiled for the CPU."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import inferc
from inferc import LLM, ConfigError, InfercError, RequestError, SamplingParams

PROMPTS = ["def add(first", "for name in", "The quick brown fox jumps over", "Café 東京 🙂"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
BLOCK_BYTES = 32 * 2 * 2 * 2 * 16 * 4  # tokens, layers, K and V, KV heads, head_dim, float32


@pytest.fixture(scope="module")
def llm(tiny_artifact: Path) -> Iterator[LLM]:
    with LLM(tiny_artifact, max_num_seqs=8, max_num_batched_tokens=64, num_threads=1) as made:
        yield made


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    """The greedy ids of each prompt, generated one after the other."""
    return [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS]


def ids(answers: list[Any]) -> list[list[int]]:
    return [answer.outputs[0].token_ids for answer in answers]


def test_a_batch_gives_what_each_prompt_gives_alone(llm: LLM, alone: list[list[int]]) -> None:
    assert ids(llm.generate(PROMPTS, GREEDY)) == alone
    as_ids = [llm.text.encode(prompt) for prompt in PROMPTS]
    answers = llm.generate(as_ids, GREEDY, use_tqdm=True)
    assert ids(answers) == alone
    assert answers[0].prompt is None
    assert answers[0].outputs[0].text == llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].text


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 4, "max_num_seqs": 4},
        {"max_num_batched_tokens": 256, "chunked_prefill": False},
        {"kv_memory_bytes": 4 * BLOCK_BYTES, "overcommit": True},
        {"pipeline": False},
    ],
)
def test_chunks_preemption_and_pipeline_change_nothing(
    tiny_artifact: Path, alone: list[list[int]], options: dict[str, Any]
) -> None:
    sampled = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True, frequency_penalty=0.5)
    with LLM(tiny_artifact, num_threads=2, **options) as other:
        assert ids(other.generate(PROMPTS, GREEDY)) == alone
        assert (other.stats().num_preemptions > 0) == ("kv_memory_bytes" in options)
        together = ids(other.generate(PROMPTS, sampled))
        assert together == [ids(other.generate(prompt, sampled))[0] for prompt in PROMPTS]
        assert other.stats().kv_usage == 0.0


def test_stop_strings_end_the_text_and_the_sequence(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].text
    stop = whole[6:9]
    output = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=(stop,)))[
        0
    ].outputs[0]
    assert output.text == whole[: whole.index(stop)]
    assert (output.finish_reason, output.stop) == ("stop", stop)
    assert len(output.token_ids) < 24


def test_n_sequences_with_logprobs(llm: LLM) -> None:
    answer = llm.generate(PROMPTS[0], SamplingParams(n=3, seed=1, max_tokens=5, logprobs=2, ignore_eos=True))[0]
    assert answer.is_finished
    assert len({tuple(output.token_ids) for output in answer.outputs}) == 3
    for output in answer.outputs:
        assert output.logprobs is not None
        assert [entry.token_id for entry in output.logprobs] == output.token_ids
        assert all(len(entry.top) == 2 for entry in output.logprobs)


def test_scores_are_the_logprobs_of_generating_the_same(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)
    answer = llm.generate(PROMPTS[2], params)[0]
    text = answer.prompt_token_ids + answer.outputs[0].token_ids
    score = llm.score(text)
    assert len(score.logprobs) == len(text) - 1
    generated = [entry.logprob for entry in answer.outputs[0].logprobs or []]
    assert score.logprobs[-40:] == pytest.approx(generated, abs=1e-6)
    assert score.argmax[-40:] == answer.outputs[0].token_ids


def test_a_scored_prompt_is_found_and_goes_on_with_the_same_bits(tiny_artifact: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=1)
    text = [number * 7 % 100 for number in range(100)]
    with LLM(tiny_artifact) as llm:
        (fresh,) = llm.generate([text], params)
    with LLM(tiny_artifact) as llm:
        score = llm.score(text, num_top=2)
        (answer,) = llm.generate([text], params)
        assert answer.num_cached_tokens == 96 and fresh.num_cached_tokens == 0
        assert answer.outputs == fresh.outputs
        assert llm.score(text, num_top=2) == score
    with LLM(tiny_artifact, prefix_cache=False) as llm:
        assert llm.score(text, num_top=2) == score


@pytest.mark.parametrize("num_top", [0, 2])
def test_the_scores_of_last_tokens_are_those_of_the_whole(tiny_artifact: Path, num_top: int) -> None:
    """The cache has what is before them or not, and a step holds a part of the text."""
    text = [number * 7 % 100 for number in range(150)]
    with LLM(tiny_artifact, max_num_batched_tokens=64, num_threads=1) as llm:
        fresh = llm.score(text, num_top, first=130, cache_salt="fresh")
        whole = llm.score(text, num_top, cache_salt="whole")
        for first in (1, 2, 31, 32, 33, 34, 64, 65, 149):
            found = llm.score(text, num_top, first=first, cache_salt="whole")
            assert found.logprobs == whole.logprobs[first - 1 :] and found.argmax == whole.argmax[first - 1 :]
            assert found.rows == (whole.rows[first - 1 :] if num_top else [])
        assert fresh.logprobs == whole.logprobs[129:]
        for first, message in ((0, "expected at least 1"), (150, "of a text of 150 tokens, 1 to 149 can be scored")):
            with pytest.raises(RequestError, match=message):
                llm.score(text, first=first)


def test_scores_with_the_likeliest_tokens_of_each_place(llm: LLM) -> None:
    """The numbers are the same, and a greedy answer's tokens have the highest of their place, to the bit."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)
    answer = llm.generate(PROMPTS[2], params)[0]
    text = answer.prompt_token_ids + answer.outputs[0].token_ids
    plain, score = llm.score(text), llm.score(text, num_top=3)
    assert [row.token_id for row in score.rows] == text[1:]
    assert score.argmax == plain.argmax == [row.top[0][0] for row in score.rows]
    assert score.logprobs == [row.logprob for row in score.rows] == pytest.approx(plain.logprobs, abs=1e-5)
    assert all(len(row.top) == 3 and (row.rank == 1) == (row.top[0][0] == row.token_id) for row in score.rows)
    assert [row.logprob for row in score.rows[-40:]] == [row.top[0][1] for row in score.rows[-40:]]
    assert [row.top[:1] for row in score.rows[-40:]] == [row.top for row in answer.outputs[0].logprobs or []]
    assert not plain.rows


def test_more_likeliest_tokens_than_there_are(llm: LLM) -> None:
    with pytest.raises(RequestError, match="prompt_logprobs is 33; expected 0 to 32"):
        llm.score([5, 6, 7], num_top=33)


def test_streams(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[3], GREEDY)[0].outputs[0]

    async def collect() -> list[str]:
        return [answer.outputs[0].text async for answer in llm.stream(PROMPTS[3], GREEDY)]

    texts = asyncio.run(collect())
    assert len(texts) > 5
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert texts[-1] == whole.text
    assert [answer.outputs[0].text for answer in llm.stream(PROMPTS[3], GREEDY)][-1] == whole.text


def test_leaving_a_stream_aborts_it(llm: LLM) -> None:
    for _ in llm.stream(PROMPTS[0], SamplingParams(max_tokens=None, ignore_eos=True)):
        break
    while llm.stats().num_running:
        pass
    assert llm.stats().finished["abort"] >= 1


def test_chat_uses_the_models_template(llm: LLM) -> None:
    message = {"role": "user", "content": "hi"}
    [one] = llm.chat([message], GREEDY)
    assert one.prompt_token_ids == llm.text.encode("<s><|user|>hi</s><|assistant|>", add_special_tokens=False)
    assert ids(llm.chat([[message], [message]], GREEDY)) == ids([one, one])


def test_bad_requests(llm: LLM) -> None:
    with pytest.raises(RequestError, match="the model takes 255 of its 256"):
        llm.generate([[5] * 300, [5]])
    with pytest.raises(RequestError, match="a text or a list of token ids"):
        llm.generate([3.5])  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="2 sampling params for 1 prompts"):
        llm.generate("a", [GREEDY, GREEDY])
    with pytest.raises(RequestError, match="max_tokens is -1"):
        llm.sampling_params(max_tokens=-1)
    assert llm.stats().num_running == 0


def test_bad_options(tiny_artifact: Path) -> None:
    with pytest.raises(ConfigError, match="no option 'max_num_seq'; did you mean max_num_seqs"):
        LLM(tiny_artifact, max_num_seq=3)
    with pytest.raises(InfercError, match="holds less than two blocks"):
        LLM(tiny_artifact, kv_memory_bytes=100)


def test_a_closed_engine_says_so(tiny_artifact: Path) -> None:
    llm = LLM(tiny_artifact, num_threads=1)
    llm.close()
    with pytest.raises(InfercError, match="the engine was closed"):
        llm.generate("a")


def test_generating_imports_neither_torch_nor_transformers(tiny_artifact: Path) -> None:
    program = (
        "import sys, inferc\n"
        f"with inferc.LLM({str(tiny_artifact)!r}, num_threads=1) as llm:\n"
        "    assert llm.generate('a')[0].outputs[0].token_ids\n"
        "assert not {'torch', 'transformers', 'triton'} & set(sys.modules), 'heavy imports'\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


def test_the_public_names() -> None:
    assert set(inferc.__all__) <= set(dir(inferc))
    assert all(getattr(inferc, name) is not None for name in inferc.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        inferc.nothing  # noqa: B018
