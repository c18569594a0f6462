"""OpenAI's bodies as sampling parameters, and what was generated as OpenAI's objects."""

from typing import Any

import pytest
from batches import CHAT, COMPLETIONS, EMBEDDINGS

from inferc import StructuredOutputs
from inferc.errors import GenerationError, ObjectiveError, RequestError
from inferc.runtime.engine.request_output import CompletionOutput
from inferc.runtime.openai.answer import Answer, Token, error_body, prompt_offsets, response_body
from inferc.runtime.openai.messages import joined
from inferc.runtime.openai.request import OpenAIRequest, StreamOptions, parse_request
from inferc.runtime.openai.text_requests import EmbeddingRequest, read_embedding, read_tokenize
from inferc.runtime.step.plan import Logprobs

MESSAGES = [{"role": "user", "content": "hi"}]


def test_a_completion_with_all_that_is_served() -> None:
    sampling: dict[str, Any] = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 7,
        "stop": ["a", "b"],
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "max_tokens": 9,
        "min_tokens": 1,
        "stop_token_ids": [3],
        "ignore_eos": True,
        "logprobs": 2,
        "cache_salt": "mine",
    }
    request = parse_request(COMPLETIONS, {"prompt": "a", **sampling, "logit_bias": {"5": 1.5}})
    assert request == OpenAIRequest("completion", ("a",), {**sampling, "logit_bias": {5: 1.5}})
    assert request.num_outputs == 2


def test_what_asks_for_nothing_is_left_alone() -> None:
    """Clients that write every field, and OpenAI's own, send such fields."""
    nothing: dict[str, Any] = {
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "stop": None,
        "logit_bias": None,
        "echo": False,
        "suffix": None,
        "best_of": 1,
        "n": None,
        "seed": None,
        "top_logprobs": None,
        "audio": None,
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "model": "gpt-4o-mini",
        "parallel_tool_calls": True,
        "modalities": ["text"],
        "prompt_cache_key": "k",
        "max_tokens": None,
    }
    assert parse_request(COMPLETIONS, {"prompt": "a", **nothing, "logprobs": None}).sampling == {}
    assert parse_request(COMPLETIONS, {"prompt": "a", "logprobs": False}).sampling == {}
    assert parse_request(COMPLETIONS, {"prompt": "a", "logprobs": True}).sampling == {"logprobs": 1}
    assert parse_request(CHAT, {"messages": MESSAGES, **nothing, "logprobs": False}).sampling == {"max_tokens": None}


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        ([1, 2], ([1, 2],)),
        (["a", "b"], ("a", "b")),
        ([[1], [2, 3]], ([1], [2, 3])),
        (["a", [1]], ("a", [1])),
    ],
)
def test_prompts(prompt: Any, prompts: tuple[Any, ...]) -> None:
    assert parse_request(COMPLETIONS, {"prompt": prompt}).prompts == prompts


def test_messages_are_of_text_and_nothing_else() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    said: dict[str, Any] = {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "annotations": []}
    request = parse_request(CHAT, {"messages": [{"role": "user", "content": parts}, said]})
    assert request.prompts == ([{"role": "user", "content": parts}, {"role": "assistant", "content": "c"}],)
    assert joined(request.prompts[0]) == [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]


@pytest.mark.parametrize(
    ("asked", "sampling"),
    [
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_completion_tokens": 5, "max_tokens": 5}, {"max_tokens": 5}),
        ({"logprobs": True}, {"max_tokens": None, "logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 3}, {"max_tokens": None, "logprobs": 3}),
    ],
)
def test_limits_and_logprobs_of_a_chat(asked: dict[str, Any], sampling: dict[str, Any]) -> None:
    assert parse_request(CHAT, {"messages": MESSAGES, **asked}).sampling == sampling


@pytest.mark.parametrize(
    ("url", "body", "message", "field"),
    [
        (EMBEDDINGS, {"input": "a"}, "the model does not allow embeddings", None),
        (COMPLETIONS, {}, "prompt is missing; give it", "prompt"),
        (COMPLETIONS, {"prompt": None}, "prompt: expected a text, a list of token ids, or a list of either,", "prompt"),
        (COMPLETIONS, {"prompt": []}, "found []", "prompt"),
        (COMPLETIONS, {"prompt": [1, "a"]}, 'found [1, "a"]', "prompt"),
        (COMPLETIONS, {"prompt": [True]}, "found [true]", "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 2049}, "found 2049 prompts, at most 2048", "prompt"),
        (COMPLETIONS, {"echo": True}, "echo is true, which is not built yet; leave it out", "echo"),
        (COMPLETIONS, {"suffix": "z"}, 'suffix is "z", which', "suffix"),
        (CHAT, {"messages": MESSAGES, "best_of": 3}, "best_of is 3, which", "best_of"),
        (COMPLETIONS, {"best_of": 129}, "best_of is 129; expected at most 128", "best_of"),
        (COMPLETIONS, {"best_of": 2, "n": 3}, "best_of 2 is less than n 3; raise it", None),
        (COMPLETIONS, {"prompt_logprobs": 33}, "prompt_logprobs is 33; expected at most 32", "prompt_logprobs"),
        (COMPLETIONS, {"use_beam_search": True}, "use_beam_search is true, which is not built", "use_beam_search"),
        (COMPLETIONS, {"mirostat": 1}, "mirostat is 1, which is not built yet; leave it out: min_p", "mirostat"),
        (COMPLETIONS, {"typical_p": 0}, "typical_p is 0; expected a value in (0.0, 1.0]", "typical_p"),
        (COMPLETIONS, {"guided_regex": 5}, "guided_regex: expected a text, found 5", "guided_regex"),
        (COMPLETIONS, {"guided_choice": ["a", 5]}, "guided_choice[1]: expected a text, found 5", "guided_choice"),
        (COMPLETIONS, {"guided_whitespace_pattern": " "}, "which is not built yet", "guided_whitespace_pattern"),
        (
            COMPLETIONS,
            {"guided_regex": "a", "grammar": "b"},
            "guided_regex: grammar gives the answer a form, too; send one of them",
            "guided_regex",
        ),
        (
            COMPLETIONS,
            {"structured_outputs": {"regxe": "a"}},
            'structured_outputs: it has no field "regxe"; did you mean regex?',
            "structured_outputs",
        ),
        (
            COMPLETIONS,
            {"guided_regex": "a", "ignore_eos": True},
            "ignore_eos is true, and an answer that is held to a form (by ",
            "ignore_eos",
        ),
        (COMPLETIONS, {"add_special_tokens": False}, "give the prompt as token ids", "add_special_tokens"),
        (COMPLETIONS, {"n": "2"}, 'n: expected an integer, found "2"', "n"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens is 0; expected at least 1", "max_tokens"),
        (COMPLETIONS, {"ignore_eos": "yes"}, 'ignore_eos: expected true or false, found "yes"', "ignore_eos"),
        (COMPLETIONS, {"logit_bias": {"a": 1}}, 'logit_bias: a key is a token id, found "a"', "logit_bias"),
        (COMPLETIONS, {"logit_bias": [1]}, "logit_bias: expected an object", "logit_bias"),
        (COMPLETIONS, {"logit_bias": {"5": "a"}}, 'logit_bias.5: expected a number, found "a"', "logit_bias"),
        (COMPLETIONS, {"stop": ["a"] * 9 + [5]}, "stop[9]: expected a text, found 5", "stop"),
        (
            COMPLETIONS,
            {"stop_token_ids": [1, 2.0]},
            "stop_token_ids[1]: expected an integer, found 2.0",
            "stop_token_ids",
        ),
        (COMPLETIONS, {"max_tokens": 16.0}, "max_tokens: expected an integer, found 16.0", "max_tokens"),
        (COMPLETIONS, {"max_tokens": True}, "max_tokens: expected an integer, found true", "max_tokens"),
        (COMPLETIONS, {"prompt": [[1], [2, True]]}, "found [[1], [2, true]]", "prompt"),
        (COMPLETIONS, {"min_p": 10**400}, "min_p is an integer of about 401 digits; expected a value in", "min_p"),
        (COMPLETIONS, {"logprobs": 40}, "logprobs is 40; expected at most 32", "logprobs"),
        (CHAT, {}, "messages is missing; give it", "messages"),
        (CHAT, {"messages": []}, "messages: expected a list of at least one message, found []", "messages"),
        (CHAT, {"messages": ["hi"]}, "messages[0]: expected an object with a role", "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content: expected text, found null", "messages"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            'messages[0].content: this model takes text parts only, found "image_url"',
            "messages",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a", "tool_call_id": "x"}]},
            'messages[0].tool_call_id is "x", which is not built yet',
            "messages",
        ),
        (CHAT, {"messages": MESSAGES, "tools": [{}]}, "tools[0].function: expected an object with a name", "tools"),
        (CHAT, {"messages": MESSAGES, "tool_choice": "required"}, "and there are no tools", "tool_choice"),
        (
            CHAT,
            {"messages": MESSAGES, "response_format": {"type": "json-schema"}},
            'response_format.type is "json-schema"; did you mean json_schema?',
            "response_format",
        ),
        (
            CHAT,
            {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema is missing; give the JSON Schema that the answer follows",
            "response_format",
        ),
        (
            CHAT,
            {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
            "response_format.json_schema.schema: expected a JSON Schema, found [1]",
            "response_format",
        ),
        (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs is 2 without logprobs", "top_logprobs"),
        (CHAT, {"messages": MESSAGES, "logprobs": 2}, "logprobs: expected true or false, found 2", "logprobs"),
        (
            CHAT,
            {"messages": MESSAGES, "max_tokens": 1, "max_completion_tokens": 2},
            "max_completion_tokens is 2 and max_tokens is 1; leave one out",
            "max_completion_tokens",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_name(
    url: str, body: dict[str, Any], message: str, field: str | None
) -> None:
    if url == COMPLETIONS and body and "prompt" not in body:
        body = {"prompt": "a", **body}
    with pytest.raises(RequestError) as raised:
        parse_request(url, body)
    assert message in str(raised.value) and "\n" not in str(raised.value)
    status, told = error_body(raised.value)
    assert status == 400
    assert told == {
        "error": {"message": str(raised.value), "type": "invalid_request_error", "param": field, "code": None}
    }


def test_other_errors_have_other_statuses() -> None:
    status, told = error_body(ObjectiveError("too late"))
    assert (status, told["error"]["type"]) == (429, "rate_limit_error")
    status, told = error_body(GenerationError("broken"))
    assert (status, told["error"]["type"], told["error"]["param"]) == (500, "server_error", None)


def token(token_id: int) -> Token:
    return ("\ufffd", None) if token_id == 9 else (f"<{token_id}>", [token_id])


ROWS = [Logprobs(1, -0.5, 1, ((1, -0.5), (2, -1.0))), Logprobs(9, float("-inf"), 7, ((3, -0.25),))]


SPELLED = {0: b"<s>", 1: b" a", 2: b" b", 3: "é".encode()[:1], 4: "é".encode()[1:], 5: b"b", 6: b"?"}


@pytest.mark.parametrize(
    ("text", "ids", "offsets"),
    [
        ("<s> a b", [0, 1, 2], [0, 3, 5]),
        (" a b", [0, 1, 2], [0, 0, 2]),
        ("a b", [0, 1, 2], [0, 0, 1]),  # the first space is the tokenizer's
        (" a b", [1, 2, 0], [0, 2, 4]),
        ("éb", [0, 3, 4, 5], [0, 0, 0, 1]),  # the parts of a character are where it is
        (" a! b", [1, 6, 2], [0, 2, 3]),  # what the tokenizer took for something else has its own length
        (" a", [1, 6, 6], [0, 2, 2]),
        ("", [], []),
    ],
)
def test_where_a_prompts_tokens_are_in_its_text(text: str, ids: list[int], offsets: list[int]) -> None:
    def spelled(token_id: int) -> Token:
        return SPELLED[token_id].decode(errors="replace"), list(SPELLED[token_id])

    assert prompt_offsets(text, ids, spelled, frozenset((0,))) == offsets


def test_a_completion() -> None:
    outputs = [CompletionOutput(0, "ab", [1, 9], "stop", "x", ROWS), CompletionOutput(1, "c", [4], "length")]
    request = OpenAIRequest("completion", ("a", "b"), {"n": 2})
    answers = [Answer(5, 2, outputs), Answer(3, 0, outputs)]
    assert response_body(request, answers, "x", "m", 7, token) == {
        "id": "cmpl-x",
        "object": "text_completion",
        "created": 7,
        "model": "m",
        "choices": [
            {"index": index, "text": output.text, "finish_reason": output.finish_reason, "logprobs": logprobs}
            for index, (output, logprobs) in enumerate(
                2
                * [
                    (
                        outputs[0],
                        {
                            "tokens": ["<1>", "\ufffd"],
                            "token_logprobs": [-0.5, -9999.0],
                            "top_logprobs": [{"<1>": -0.5, "<2>": -1.0}, {"<3>": -0.25, "\ufffd": -9999.0}],
                            "text_offset": [0, 3],
                        },
                    ),
                    (outputs[1], None),
                ]
            )
        ],
        "usage": {
            "prompt_tokens": 8,
            "completion_tokens": 6,
            "total_tokens": 14,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


def test_a_chat_completion() -> None:
    outputs = [CompletionOutput(0, "ab", [1, 9], "stop", "x", ROWS)]
    body = response_body(OpenAIRequest("chat", (MESSAGES,), {}), [Answer(5, 2, outputs)], "x", "m", 7, token)
    assert (body["id"], body["object"]) == ("chatcmpl-x", "chat.completion")
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "ab", "refusal": None}
    assert choice["finish_reason"] == "stop"
    first, second = choice["logprobs"]["content"]
    assert first == {
        "token": "<1>",
        "logprob": -0.5,
        "bytes": [1],
        "top_logprobs": [
            {"token": "<1>", "logprob": -0.5, "bytes": [1]},
            {"token": "<2>", "logprob": -1.0, "bytes": [2]},
        ],
    }
    assert (second["token"], second["bytes"]) == ("\ufffd", None)


def test_a_conversation_is_tokenized_without_parameters_of_sampling() -> None:
    made = read_tokenize({"messages": MESSAGES, "temperature": "hot", "n": 1000, "add_generation_prompt": False})
    assert (made.prompt, made.template) == (MESSAGES, {"add_generation_prompt": False})
    for body, message in (
        ({"tools": [{"type": "function"}]}, r"tools\[0\].function: expected an object with a name"),
        ({"add_special_tokens": True}, "the chat template writes its own"),
        ({"messages": [{"role": 5}]}, r"messages\[0\]: expected an object"),
        ({"prompt": "a"}, "expected one of prompt and messages"),
    ):
        with pytest.raises(RequestError, match=message):
            read_tokenize({"messages": MESSAGES, **body})


def test_a_request_says_how_its_answer_comes() -> None:
    options = {"include_usage": True, "continuous_usage_stats": None}
    request = parse_request(CHAT, {"messages": MESSAGES, "stream": True, "stream_options": options}, is_served=True)
    assert request.stream and request.stream_options == StreamOptions(include_usage=True)
    assert not parse_request(COMPLETIONS, {"prompt": "a", "stream": None, "stream_options": None}).stream


def test_vectors_that_are_asked_for() -> None:
    body = {"input": [[1], [2]], "encoding_format": "base64", "dimensions": 8, "model": "m"}
    assert read_embedding(body) == EmbeddingRequest("m", [[1], [2]], "base64", 8)
    for value, message in ((0, "dimensions is 0; expected at least 1"), ("8", "dimensions: expected an integer")):
        with pytest.raises(RequestError, match=message):
            read_embedding({"input": "a", "dimensions": value})


@pytest.mark.parametrize(
    ("body", "form"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {}, "guided_choice": [], "grammar": "", "structured_outputs": {}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
        ({"response_format": {"type": "json_object", "schema": {"a": 1}}}, StructuredOutputs(json='{"a": 1}')),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {}}}},
            StructuredOutputs(json="{}"),
        ),
        ({"response_format": {"type": "json_schema", "schema": {}}}, StructuredOutputs(json="{}")),
        ({"guided_json": {}}, StructuredOutputs(json="{}")),
        ({"guided_json": '{"type": "null"}'}, StructuredOutputs(json='{"type": "null"}')),
        ({"json_schema": {"type": "null"}}, StructuredOutputs(json='{"type": "null"}')),
        ({"guided_regex": "a+", "guided_decoding_backend": "outlines"}, StructuredOutputs(regex="a+")),
        ({"regex": "a+"}, StructuredOutputs(regex="a+")),
        ({"guided_choice": ["a", "b"]}, StructuredOutputs(choice=("a", "b"))),
        ({"guided_grammar": "start: X"}, StructuredOutputs(grammar="start: X")),
        ({"ebnf": "root ::= x"}, StructuredOutputs(grammar="root ::= x")),
        ({"grammar": "root ::= x"}, StructuredOutputs(grammar="root ::= x")),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
            StructuredOutputs(json="{}", disable_any_whitespace=True),
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("url", [COMPLETIONS, CHAT])
def test_forms_by_the_names_that_clients_have(url: str, body: dict[str, Any], form: StructuredOutputs | None) -> None:
    prompt: dict[str, Any] = {"messages": MESSAGES} if url == CHAT else {"prompt": "a"}
    assert parse_request(url, {**prompt, **body}).params.structured_outputs == form, "in a batch file too"
    request = parse_request(url, {**prompt, **body}, is_served=True)
    assert request.params.structured_outputs == form and not request.warnings
    if form is not None:
        label = request.params.structured_outputs.label if request.params.structured_outputs else ""
        assert label.split(".")[0] in body
