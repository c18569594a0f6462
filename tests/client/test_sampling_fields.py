"""Every sampling parameter on its way through the gRPC client: what a caller gives is what the server reads."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from inferc.client.messages import generate_request
from inferc.errors import RequestError
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.step.structured_outputs import FORMS, StructuredOutputs
from inferc.serve.grpc.protocol import sampling_params
from inferc.serve.protos.inferc.v1 import inference_pb2 as pb

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG: dict[str, Any] = {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}
VALUES: dict[str, Any] = {
    "n": 3,
    "best_of": 2,
    "temperature": 0.25,
    "top_k": 7,
    "seed": 1 << 60,
    "stop": ("a", "é"),
    "max_tokens": 5,
    "min_tokens": 2,
    "skip_special_tokens": False,
    "logit_bias": {3: -1.5, 900: 2.0},
    "bad_words_ids": ((1, 2), (3,)),
    "dry_penalty_last_n": 64,
    "dry_base": 2.5,
    "dry_allowed_length": 4,
    "dry_sequence_breakers": ("x", "\n"),
    "repetition_penalty": 1.25,
    "logits_processors": (lambda token_ids, logits: logits,),
    "structured_outputs": StructuredOutputs(json=json.dumps(SCHEMA)),
}
BY_TYPE: dict[str, Any] = {
    "int": 1,
    "int | None": 1,
    "float": 0.5,
    "float | None": 0.5,
    "bool": True,
    "str": "a",
    "tuple[str, ...]": ("a",),
    "tuple[int, ...]": (4, 5),
}
"""A value of each type for the parameters that are not named above: none is the default of any of them."""
BESIDE = ("prompt_logprobs", "tap")  # fields of a request, beside its sampling
OF_A_SCRIPT = (
    "best_of",
    "adapter",
    "logits_processors",
)  # no message has them: who has all outputs chooses, and `model` names an adapter


def sent(**options: Any) -> pb.GenerateRequest:
    """Return a request as it is on the other side."""
    return pb.GenerateRequest.FromString(generate_request("a", "m", **options).SerializeToString())


@pytest.mark.parametrize("field", dataclasses.fields(SamplingParams), ids=lambda field: str(field.name))
def test_the_server_reads_what_the_caller_gives(field: dataclasses.Field[Any]) -> None:
    value: Any = VALUES.get(field.name, BY_TYPE.get(str(field.type)))
    expected = SamplingParams(**{field.name: value})
    assert expected != SamplingParams(), f"{field.name} needs a value in VALUES"
    if field.name in OF_A_SCRIPT:
        with pytest.raises(RequestError, match=f"unknown sampling parameter {field.name}"):
            sent(**{field.name: value})
    elif field.name in BESIDE:
        assert getattr(sent(**{field.name: value}), field.name) == value
    else:
        given = sent(**{field.name: value})
        assert given.sampling.ByteSize() > 0 and sampling_params(given.sampling, {}) == expected


@pytest.mark.parametrize(
    ("given", "form"),
    [
        ({"json": SCHEMA}, "json"),
        ({"json": json.dumps(SCHEMA), "disable_any_whitespace": True}, "json"),
        ({"json_object": True}, "json_object"),
        ({"regex": "[a-c]"}, "regex"),
        ({"choice": ["left", "right"]}, "choice"),
        ({"grammar": 'root ::= "a"'}, "grammar"),
        ({"structural_tag": TAG}, "structural_tag"),
    ],
)
def test_a_form_is_given_as_a_script_has_it(given: dict[str, Any], form: str) -> None:
    """Forms are given as in `inferc.SamplingParams`: a StructuredOutputs, or a map with schemas as text or not."""
    assert form in FORMS
    expected = StructuredOutputs(**given)
    for value in (given, expected):
        found = sampling_params(sent(structured_outputs=value).sampling, {}).structured_outputs
        assert found == expected
    message = generate_request("a", "m", structured_outputs=expected).sampling.structured_outputs
    assert sampling_params(sent(structured_outputs=message).sampling, {}).structured_outputs == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"jsn": SCHEMA}, 'it has no field "jsn"; did you mean json'),
        ({}, "expected one of json, json_object, regex, choice, grammar, structural_tag, found none"),
        ("a", "structured_outputs: expected an object"),
        ({"json": {"a": object()}}, "structured_outputs.json: it is no JSON"),
    ],
)
def test_a_wrong_form_is_told_before_it_is_sent(given: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        generate_request("a", "m", structured_outputs=given)
