"""What a request may ask for, and the messages where it may not."""

from __future__ import annotations

from typing import Any

import pytest

from inferc.errors import RequestError
from inferc.runtime.sampling_params import SamplingParams, from_request, generation_defaults


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
        ({"n": 0}, "n is 0; expected at least 1"),
        ({"n": True}, "n: expected an integer, found True"),
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
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**values)


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


def test_an_unknown_parameter_is_named() -> None:
    with pytest.raises(RequestError, match="unknown sampling parameter temprature; known: .*temperature"):
        from_request({"temprature": 1})
