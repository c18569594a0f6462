"""Logits processors of requests: called with the tokens so far on every target that can, alone, batched and drafted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_calls import request

from inferc import LLM, CompileConfig, SamplingParams, compile
from inferc.errors import GenerationError, RequestError

PROMPTS = ["def add(first", "for name in", "The quick brown fox"]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(tiny_artifact: Path) -> Iterator[LLM]:
    with LLM(tiny_artifact, max_num_seqs=4, num_threads=2) as made:
        yield made


@pytest.fixture(scope="module")
def reference(tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    out = tmp_path_factory.mktemp("artifacts") / "reference"
    compile(tiny_llama_folder, out, CompileConfig(target="reference", certify="none"))
    with LLM(out, max_num_seqs=4) as made:
        yield made


def no_repeats(token_ids: list[int], logits: Any) -> Any:
    """Forbid what is in the answer already, in place as scripts for torch do."""
    logits[token_ids] = -np.inf
    return logits


def like_the_prompt(prompt: list[int], token_ids: list[int], logits: Any) -> Any:
    """Favour the token of the prompt at the same place, and none of those before."""
    shifted = logits + 0
    shifted[prompt[len(token_ids) % len(prompt)]] += 50.0
    return shifted


def ids(llm: LLM, prompts: Any, **params: Any) -> list[list[int]]:
    answers = llm.generate(prompts, SamplingParams(**{**GREEDY, **params}))
    return [output.token_ids for answer in answers for output in answer.outputs]


def test_they_get_the_tokens_so_far_and_their_logits_decide(llm: LLM) -> None:
    seen: list[tuple[list[int], list[int]]] = []

    def note(prompt: list[int], token_ids: list[int], logits: Any) -> Any:
        assert logits.dtype == np.float32 and logits.ndim == 1
        seen.append((prompt, token_ids))
        return np.where(np.arange(len(logits)) == 40 + len(token_ids), np.float32(1), np.float32(-1))

    (found,) = ids(llm, PROMPTS[0], logits_processors=[note], max_tokens=5)
    prompt = llm.text.encode(PROMPTS[0])
    assert found == [40, 41, 42, 43, 44]
    assert seen == [(prompt, found[:count]) for count in range(5)]


def test_without_effect_they_change_nothing(llm: LLM) -> None:
    for params in ({}, {"temperature": 0.9, "seed": 4}, {"temperature": 0.7, "seed": 5, "top_p": 0.8, "logprobs": 3}):
        plain = ids(llm, PROMPTS, **params)
        assert ids(llm, PROMPTS, **params, logits_processors=[lambda token_ids, logits: logits]) == plain


def test_the_same_alone_and_batched_with_others(llm: LLM) -> None:
    params = [
        SamplingParams(**GREEDY, logits_processors=[no_repeats]),
        SamplingParams(**GREEDY),
        SamplingParams(**{**GREEDY, "temperature": 0.8}, seed=7, n=2, logits_processors=[like_the_prompt, no_repeats]),
    ]
    alone = [llm.generate(*pair)[0].outputs for pair in zip(PROMPTS, params, strict=True)]
    together = [answer.outputs for answer in llm.generate(PROMPTS, params)]
    assert [[o.token_ids for o in each] for each in together] == [[o.token_ids for o in each] for each in alone]
    assert len(set(alone[0][0].token_ids)) == 16 and alone[2][0].token_ids != alone[2][1].token_ids


def test_the_reference_gives_the_same(llm: LLM, reference: LLM) -> None:
    cases: tuple[dict[str, Any], ...] = (
        {"logits_processors": [no_repeats]},
        {"logits_processors": [like_the_prompt], "temperature": 0.8, "seed": 3, "min_p": 0.01},
        {"logits_processors": [no_repeats], "repetition_penalty": 1.2, "logit_bias": {9: 3.0}},
    )
    for params in cases:
        assert ids(llm, PROMPTS, **params) == ids(reference, PROMPTS, **params)


def test_rows_behind_drafts_are_changed_like_others(tiny_artifact: Path, llm: LLM) -> None:
    text = "one two one two one two one two"
    wanted: list[dict[str, Any]] = [
        {"logits_processors": [like_the_prompt]},
        {"logits_processors": [no_repeats], "seed": 5, "temperature": 1},
    ]
    with LLM(tiny_artifact, max_num_seqs=4, num_threads=1, speculate="ngram") as drafting:
        for params in wanted:
            assert ids(drafting, [text], max_tokens=40, **params) == ids(llm, [text], max_tokens=40, **params)
        assert drafting.stats().num_accepted > 0, "nothing was drafted"


def test_more_rows_than_are_sampled_at_once(tiny_artifact: Path) -> None:
    """The sampler gets 64 rows at a time; each keeps its own functions."""

    def favour(token: int) -> Any:
        def favoured(token_ids: list[int], logits: Any) -> Any:
            logits[token] += 100
            return logits

        return favoured

    params = [SamplingParams(**{**GREEDY, "max_tokens": 3}, logits_processors=[favour(5 + i)]) for i in range(70)]
    params[10:20] = [SamplingParams(**{**GREEDY, "max_tokens": 3})] * 10
    with LLM(tiny_artifact, max_num_seqs=80, num_threads=2) as many:
        plain = many.generate(PROMPTS[0], params[10])[0].outputs[0].token_ids
        found = [each.outputs[0].token_ids for each in many.generate([PROMPTS[0]] * 70, params)]
    assert found == [[5 + i] * 3 if not 10 <= i < 20 else plain for i in range(70)]


def failing(token_ids: list[int], logits: Any) -> Any:
    if len(token_ids) == 2:
        raise KeyError("colour")
    return logits


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (failing, "logits_processors: failing failed with KeyError: 'colour'"),
        (lambda token_ids, logits: None, "returned no array; expected the logits, of shape"),
        (lambda token_ids, logits: logits[:3], r"returned an array of shape \[3\]; expected the logits, of shape"),
        (lambda token_ids, logits: "x", "failed with ValueError"),
    ],
)
def test_a_failure_ends_its_request_alone(llm: LLM, processor: Any, message: str) -> None:
    stream = iter(llm.stream(PROMPTS[1], SamplingParams(**GREEDY)))
    first = next(stream)
    with pytest.raises(GenerationError, match=message):
        llm.generate(PROMPTS[0], SamplingParams(**GREEDY, logits_processors=[processor]))
    rest = list(stream)
    assert (rest or [first])[-1].outputs[0].token_ids == ids(llm, PROMPTS[1])[0]


def test_log_probabilities_are_those_of_the_changed_logits(llm: LLM) -> None:
    def only_two(token_ids: list[int], logits: Any) -> Any:
        changed = np.full_like(logits, -np.inf)
        changed[[7, 9]] = np.log([0.75, 0.25])
        return changed

    params = SamplingParams(**GREEDY, logprobs=2, logits_processors=[only_two])
    row = llm.generate(PROMPTS[0], params)[0].outputs[0].logprobs[0]  # type: ignore[index]
    assert [token for token, _ in row.top] == [7, 9]
    assert [value for _, value in row.top] == pytest.approx(np.log([0.75, 0.25]), abs=1e-6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["x"], 'logits_processors: expected functions, found "x" among them'),
        ([lambda logits: logits], "takes .* expected .token_ids, logits., or .prompt_token_ids"),
        ([no_repeats] * 65, "logits_processors: found 65 functions, at most 64 are allowed"),
        (no_repeats, "logits_processors: expected a list, found"),
    ],
)
def test_what_cannot_be_called_is_refused(given: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(logits_processors=given)


def test_a_recording_refuses_them(tiny_artifact: Path, tmp_path: Path) -> None:
    with (
        LLM(tiny_artifact, record=str(tmp_path / "calls.jsonl"), num_threads=1) as recording,
        pytest.raises(RequestError, match="logits_processors: a recording cannot keep functions"),
    ):
        recording.generate(PROMPTS[0], SamplingParams(**GREEDY, logits_processors=[no_repeats]))


def test_servers_refuse_them_by_name(url: str) -> None:
    reply = request(url, "/v1/completions", {"prompt": "a", "logits_processors": ["x"]})
    assert reply.status == 400 and "logits_processors" in json.dumps(reply.error)


def test_taps_see_what_they_make(tiny_artifact: Path) -> None:
    """A step whose values are kept may have processors, too."""
    with LLM(tiny_artifact, num_threads=1, tap=["lm_head.linear"]) as tapping:
        params = SamplingParams(**{**GREEDY, "max_tokens": 3}, tap=True, logits_processors=[no_repeats])
        found = tapping.generate(PROMPTS[0], params)[0].outputs[0].token_ids
        assert len(set(found)) == 3
        (kept,) = tapping.tapped()
        assert kept.values["lm_head.linear"].shape[0] == 3
