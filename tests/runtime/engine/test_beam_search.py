"""Beam search against transformers' own, on the same model in float32."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from inferc import LLM, RequestError
from inferc.runtime.engine.beam_search import BeamSearch, BeamSearchParams, likely_by, search

ENDS = (1, 17, 33)  # few enough tokens that answers end early


@pytest.fixture(scope="module")
def model(tiny_llama_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_llama_folder).eval()


@pytest.fixture(scope="module")
def llm(tiny_artifact: Path) -> Iterator[LLM]:
    with LLM(tiny_artifact, max_num_seqs=32, num_threads=1) as made:
        yield made


def answers_of(model: Any, prompt: list[int], params: BeamSearchParams, ends: tuple[int, ...]) -> Any:
    """Return transformers' answers and their scores."""
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        do_sample=False,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_new_tokens=params.max_tokens,
        eos_token_id=list(ends) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    texts = [each[len(prompt) :].tolist() for each in found.sequences]
    cut = [next((at + 1 for at, token in enumerate(ids) if token in ends), len(ids)) for ids in texts]
    return [ids[:end] for ids, end in zip(texts, cut, strict=True)], found.sequences_scores.tolist()


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -1.0, 2.0])
def test_answers_and_scores_are_those_of_transformers(
    llm: LLM, model: Any, length_penalty: float, early_stopping: Any
) -> None:
    draw = np.random.default_rng(int(10 * length_penalty + 20) + len(str(early_stopping)))
    for width, ends in product((2, 5), (ENDS, (1,))):
        prompts = [draw.integers(3, 90, count).tolist() for count in (1, 7, 40)]
        params = BeamSearchParams(width, 12, length_penalty, early_stopping)
        found = search(prompts, params, ends, 256, likely_by(llm.generate))
        assert [each.prompt_token_ids for each in found] == prompts
        for prompt, output in zip(prompts, found, strict=True):
            texts, scores = answers_of(model, prompt, params, ends)
            assert [each.token_ids for each in output.sequences] == texts
            assert [each.score for each in output.sequences] == pytest.approx(scores, rel=1e-5)
            for each in output.sequences:
                assert (each.finish_reason == "stop") == (each.token_ids[-1] in ends)
                length = len(each.token_ids)
                assert each.score == pytest.approx(each.cumulative_logprob / length**length_penalty)


def test_one_beam_is_greedy(llm: LLM) -> None:
    from inferc import SamplingParams

    greedy = llm.generate(prompt_token_ids=[5, 6, 7], sampling_params=SamplingParams(temperature=0, max_tokens=9))
    (found,) = search([[5, 6, 7]], BeamSearchParams(1, 9), (1,), 256, likely_by(llm.generate))
    assert found.sequences[0].token_ids == greedy[0].outputs[0].token_ids


def test_beams_find_what_they_begin_with_in_the_cache(llm: LLM) -> None:
    before = llm.stats()
    prompt = list(range(3, 83))
    search([prompt], BeamSearchParams(4, 10), (), 256, likely_by(llm.generate))
    now = llm.stats()
    admitted, cached = now.admitted_tokens - before.admitted_tokens, now.cached_tokens - before.cached_tokens
    assert admitted - cached <= len(prompt) + 10 * 4 * 8, "of each text the last tokens alone are computed"


def test_a_search_ends_at_the_length_of_the_model(llm: LLM) -> None:
    prompt = list(range(3, 90)) * 2 + list(range(3, 80))
    (found,) = search([prompt], BeamSearchParams(2, 100), (), 256, likely_by(llm.generate))
    assert {len(each.token_ids) for each in found.sequences} == {256 - len(prompt)}
    assert {each.finish_reason for each in found.sequences} == {"length"}


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"beam_width": 0}, "beam_width is 0, expected an integer of at least 1"),
        ({"beam_width": True}, "beam_width is True, expected an integer"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens is 0, expected an integer of at least 1"),
        ({"beam_width": 2, "early_stopping": "soon"}, "early_stopping is 'soon', expected true, false or never"),
        ({"beam_width": 2, "length_penalty": float("nan")}, "length_penalty is nan, expected a number"),
    ],
)
def test_values_out_of_range_are_told(values: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestError, match=told):
        BeamSearchParams(**values)


def test_more_beams_than_likely_tokens_are_told() -> None:
    with pytest.raises(RequestError, match="beam_width is 12: with 3 end tokens it needs the 48 likeliest tokens of a"):
        search([[3]], BeamSearchParams(12), ENDS, 256, likely_by(lambda **_: []))
    assert search([], BeamSearchParams(12), ENDS, 256, likely_by(lambda **_: [])) == []


def test_answers_that_end_late_take_no_place_of_beams() -> None:
    """Only the first `beam_width` continuations may end; the others are there so that enough beams go on."""
    made = BeamSearch([3], BeamSearchParams(2, 9), (1,), 9)
    made.step([[(1, -0.1), (5, -0.2), (6, -0.3), (7, -0.4)]])
    assert [each.token_ids for each in made.found] == [[1]] and made.texts == [[3, 5], [3, 6]]
    made.step([[(8, -0.1), (9, -0.2)], [(8, -0.1), (1, -0.9)]])
    assert len(made.found) == 1, "the fourth of four is no answer"


def test_texts_are_searched_for_as_well(llm: LLM) -> None:
    text = "def add(first"
    (by_text,) = llm.beam_search(text, BeamSearchParams(3, 8))
    (by_ids,) = llm.beam_search({"prompt_token_ids": llm.text.encode(text)}, BeamSearchParams(3, 8))
    assert by_text == by_ids and len(by_text.sequences) == 3
    assert all(each.text == llm.text.decode(each.token_ids) for each in by_text.sequences)
    with pytest.raises(RequestError, match="LLM.beam_search has no parameter"):
        llm.beam_search(text, BeamSearchParams(3), beam_width=3)
