"""Tests of what a request may ask for, and of the messages if it may not."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from inferc.errors import RequestError
from inferc.runtime.step.generation_defaults import generation_defaults
from inferc.runtime.step.sampling_params import SamplingParams, changed, from_chat, from_request


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": -1}, "max_tokens is -1; expected at least 1"),
        ({"max_tokens": 1.5}, "max_tokens: expected an integer, found 1.5"),
        (
            {"temperature": -0.1},
            r"temperature is -0.1; expected a value in \[0.0, 100.0\] \(use 0 for greedy decoding\)",
        ),
        ({"temperature": float("nan")}, "temperature: expected a finite number"),
        ({"top_p": 0}, r"top_p is 0; expected a value in \(0.0, 1.0\]"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_k": -2}, r"top_k is -2; expected at least 0 \(use 0 to turn it off\)"),
        ({"min_p": 2}, "min_p is 2"),
        ({"typical_p": 0}, r"typical_p is 0; expected a value in \(0.0, 1.0\] \(use 1 to turn it off\)"),
        (
            {"xtc_probability": 1.5},
            r"xtc_probability is 1.5; expected a value in \[0.0, 1.0\] \(use 0",
        ),
        (
            {"xtc_threshold": -1},
            r"xtc_threshold is -1; expected a value in \[0.0, 1.0\] \(above 0.5",
        ),
        ({"mirostat": 2}, "mirostat is 2, which is not built yet; leave it out: min_p, typical_p and xtc_probability"),
        ({"n": 0}, "n is 0; expected at least 1"),
        ({"n": True}, "n: expected an integer, found true"),
        ({"presence_penalty": 3}, "presence_penalty is 3"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"logprobs": 99}, "logprobs is 99; expected at most"),
        ({"stop": ""}, "expected strings that are not empty"),
        ({"stop": 5}, "stop: expected a list, found 5"),
        ({"stop_token_ids": [-1]}, "stop_token_ids is -1"),
        ({"min_tokens": 20, "max_tokens": 10}, "min_tokens 20 is more than max_tokens 10"),
        ({"logit_bias": {5: 101}}, r"logit_bias\[5\] is 101"),
        ({"logit_bias": [1]}, "logit_bias: expected a map"),
        ({"ignore_eos": "yes"}, 'ignore_eos: expected true or false, found "yes"'),
        ({"no_repeat_ngram_size": -1}, r"no_repeat_ngram_size is -1; expected at least 0 \(use 0 to turn it off\)"),
        ({"dry_multiplier": -1}, r"dry_multiplier is -1; expected a value in \[0.0, 100.0\] \(use 0 to turn it off\)"),
        ({"dry_base": 0.5}, r"dry_base is 0.5; expected a value in \[1.0, 100.0\]"),
        ({"dry_allowed_length": 51}, "dry_allowed_length is 51; expected at most 50"),
        ({"dry_penalty_last_n": -2}, r"dry_penalty_last_n is -2; expected at least -1 \(use -1 for all tokens\)"),
        ({"dry_sequence_breakers": "x"}, 'dry_sequence_breakers: expected a list, found "x"'),
        ({"dry_sequence_breakers": ["x", ""]}, 'dry_sequence_breakers: expected texts that are not empty, found ""'),
        ({"dry_sequence_breakers": ["x"] * 65}, "dry_sequence_breakers: found 65 texts, at most 64 are allowed"),
        ({"dry_sequence_breakers": ["x" * 4097]}, "dry_sequence_breakers: the texts have 4097 characters together"),
        ({"dry_breaker_ids": [-1]}, "dry_breaker_ids is -1"),
        ({"bad_words": "no"}, 'bad_words: expected a list, found "no"'),
        ({"bad_words": ["no", " "]}, 'bad_words: expected texts that are more than spaces, found " "'),
        ({"bad_words": [5]}, "bad_words: expected texts that are more than spaces, found 5"),
        ({"bad_words": ["\ud800"]}, "bad_words: it is not text"),
        ({"bad_words": ["a"] * 1025}, "bad_words: found 1025 texts, at most 1024 are allowed"),
        ({"bad_words": ["a" * 16_385]}, "bad_words: the texts have 16385 characters together, at most 16384"),
        ({"bad_words_ids": [[5], 6]}, "bad_words_ids: expected lists of token ids, found 6 among them"),
        ({"bad_words_ids": [[5], []]}, r"bad_words_ids: expected lists of token ids, found \[\] among them"),
        ({"bad_words_ids": [[5, -1]]}, "bad_words_ids is -1; expected at least 0"),
        ({"bad_words_ids": [[5, "6"]]}, 'bad_words_ids: expected an integer, found "6"'),
        ({"bad_words_ids": [[5]] * 4097}, "bad_words_ids: found 4097 words, at most 4096 are allowed"),
        ({"bad_words_ids": [[5] * 65_537]}, "bad_words_ids: the words have 65537 tokens together, at most 65536"),
        ({"stop_token_ids": [5] * 2**19}, "stop_token_ids: found 524288 entries, at most 262144 are allowed"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**values)


HUGE = (10**399, -(10**399), 10**5000, -(10**5000))
NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
    "xtc_probability",
    "xtc_threshold",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "dry_multiplier",
    "dry_base",
    "ttft_ms",
    "tbt_ms",
)
INTEGERS = (
    "n",
    "best_of",
    "top_k",
    "seed",
    "logprobs",
    "max_tokens",
    "min_tokens",
    "cache_priority",
    "priority",
    "stop_token_ids",
    "allowed_token_ids",
    "banned_token_ids",
    "no_repeat_ngram_size",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_breaker_ids",
)


@pytest.mark.parametrize("name", [*NUMBERS, *INTEGERS, "logit_bias"])
@pytest.mark.parametrize("value", HUGE, ids=["400", "-400", "5000", "-5000"])
def test_a_number_of_hundreds_of_digits_is_out_of_range(name: str, value: int) -> None:
    """No float is as large, and Python writes no integer of more than 4300 digits."""
    given = [value] if name.endswith("_ids") else {5: value} if name == "logit_bias" else value
    with pytest.raises(RequestError, match=name) as raised:
        from_request({name: given})
    message = str(raised.value)
    assert "integer of about" in message and "; expected" in message and len(message) < 200
    if name == "logit_bias" and value > 0:
        with pytest.raises(RequestError, match="logit_bias: token id"):
            from_request({name: {value: 1.0}})


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, True, "1", None, [1]])
def test_what_is_no_finite_number_is_refused(name: str, value: Any) -> None:
    if value is None:
        assert from_request({name: value}) == SamplingParams()
    else:
        with pytest.raises(RequestError, match=f"{name}: expected a finite number"):
            from_request({name: value})


@pytest.mark.parametrize("wrong", [1.5, True, "1", -1, 2**31])
@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "banned_token_ids", "logit_bias"])
def test_one_wrong_id_among_many_is_found(name: str, wrong: Any) -> None:
    ids = [*range(1000), wrong, *range(1000, 2000)]
    with pytest.raises(RequestError, match=name):
        from_request({name: dict.fromkeys(ids, 1.0) if name == "logit_bias" and wrong is not True else ids})


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -100.5, True, "1", None])
@pytest.mark.parametrize("place", [0, 500, 1000])
def test_one_wrong_bias_among_many_is_found(wrong: Any, place: int) -> None:
    biases = [0.5, -100, 100.0] * 333 + [1]
    biases.insert(place, wrong)
    with pytest.raises(RequestError, match=rf"logit_bias\[{place}\]"):
        from_request({"logit_bias": dict(enumerate(biases))})


def test_half_a_surrogate_pair_is_no_stop_string() -> None:
    with pytest.raises(RequestError, match="stop: it is not text"):
        SamplingParams(stop=("a", "\ud800"))


@pytest.mark.parametrize("name", [name for name in INTEGERS if not name.endswith("_ids")])
@pytest.mark.parametrize("value", [16.0, True, "1", math.inf])
def test_what_is_no_integer_is_refused(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"{name}: expected an integer"):
        from_request({name: value})


def test_a_changed_copy_is_another() -> None:
    params = SamplingParams(stop=("a", "é"), logit_bias={7: -0.5}, stop_token_ids=(3,), seed=2**64 - 1, ttft_ms=1.5)
    assert changed(params, max_tokens=5) == dataclasses.replace(params, max_tokens=5)
    assert params.max_tokens == 16


def test_forms_that_clients_send() -> None:
    params = SamplingParams(stop="x", top_k=-1, stop_token_ids=[1, 2])  # type: ignore[arg-type]
    assert (params.stop, params.top_k, params.stop_token_ids) == (("x",), 0, (1, 2))
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]
    assert SamplingParams(temperature=0).greedy


def test_a_request_goes_over_the_models_defaults() -> None:
    config = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": None,
        "max_new_tokens": 50,
        "eos_token_id": 1,
    }
    defaults = generation_defaults(config)
    assert defaults == {"temperature": 0.6, "top_k": 20, "max_tokens": 50}
    params = from_request({"temperature": 0.1, "top_k": None, "seed": 7}, defaults)
    assert (params.temperature, params.top_k, params.max_tokens, params.seed) == (0.1, 20, 50, 7)
    assert from_request({"max_tokens": None}, defaults).max_tokens is None
    assert generation_defaults({"do_sample": False, "temperature": 0.6}) == {"temperature": 0.0}


@pytest.mark.parametrize(
    ("config", "wanted", "message"),
    [
        ({"top_p": 0}, {}, "not followed in top_p: top_p is 0"),
        ({"max_new_tokens": 0}, {}, "not followed in max_new_tokens: max_tokens is 0"),
        ({"min_new_tokens": -1}, {}, "not followed in min_new_tokens: min_tokens is -1"),
        ({"stop_strings": [""]}, {}, "not followed in stop_strings: stop: expected strings that are not empty"),
        ({"suppress_tokens": [-1]}, {}, "not followed in suppress_tokens and bad_words_ids: banned_token_ids is -1"),
        ({"suppress_tokens": "x", "bad_words_ids": [5, []]}, {}, 'banned_token_ids: expected an integer, found "x"'),
        ({"bad_words_ids": [[5, -6]]}, {}, "not followed in bad_words_ids: bad_words_ids is -6"),
        ({"no_repeat_ngram_size": -3}, {}, "not followed in no_repeat_ngram_size: no_repeat_ngram_size is -3"),
        (
            {"min_new_tokens": 9, "max_new_tokens": 4},
            {"min_tokens": 4, "max_tokens": 4},
            "not followed in min_new_tokens: 9 is more than max_new_tokens 4",
        ),
    ],
)
def test_a_default_that_no_request_could_ask_for_is_left_out(
    config: dict[str, Any], wanted: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    defaults = generation_defaults(config)
    assert defaults == wanted and message in caplog.text
    from_request({}, defaults)


def test_a_chat_is_as_long_as_fits_unless_its_model_has_a_limit() -> None:
    assert from_chat({}, {}).max_tokens is None
    assert from_chat({"max_tokens": None, "top_k": 3}, {"max_tokens": 9}) == SamplingParams(max_tokens=9, top_k=3)
    assert from_chat({"max_tokens": 5}, {"max_tokens": 9, "min_tokens": 7}) == SamplingParams(
        max_tokens=5, min_tokens=5
    )


def test_an_unknown_parameter_is_named() -> None:
    with pytest.raises(RequestError, match="unknown sampling parameter temprature; did you mean temperature?"):
        from_request({"temprature": 1})
