"""The HTTP endpoint as it goes over the wire."""

import asyncio
import json
import socket
from collections import Counter
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from http_calls import request
from serving import Server

from inferc.client import Client
from inferc.errors import RequestError
from inferc.runtime.openai.reasoning_wishes import NAME_IGNORED, READS_NAME
from inferc.serve.http import address as http_address
from inferc.serve.http import slow_clients as http_protocol
from inferc.serve.http.server import HttpServer, make_app
from inferc.serve.security.access import Access

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


# ------------------------------------------------------------------------------------------------- answers


def test_echo_with_a_stream_is_echo_without(url: str) -> None:
    body = {"prompt": "def add(", "echo": True, "logprobs": 2, "prompt_logprobs": 1, "return_token_ids": True, **GREEDY}
    whole = request(url, COMPLETIONS, body).json["choices"][0]
    events = [event["choices"][0] for event in request(url, COMPLETIONS, {**body, "stream": True}).events]
    assert "".join(event["text"] for event in events) == whole["text"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        rows = [row for event in events if event["logprobs"] for row in event["logprobs"][name]]
        assert rows == whole["logprobs"][name], name
    assert events[0]["prompt_logprobs"] == whole["prompt_logprobs"]
    assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert [token for event in events for token in event.get("token_ids", ())] == whole["token_ids"]
    first, second = whole["prompt_logprobs"][:2]
    assert first is None and str(whole["prompt_token_ids"][1]) in second
    assert all(set(row) == {"logprob", "rank", "decoded_token"} for row in second.values())


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_are_into_the_text_that_comes_back(url: str, stream: bool) -> None:
    ids = request(url, "/tokenize", {"prompt": "def add("}).json["tokens"]
    for prompt, text in (("def add(", "def add("), ([0, *ids], "<s>def add(")):
        body = {"prompt": prompt, "echo": True, "logprobs": 1, "stream": stream, **GREEDY}
        reply = request(url, COMPLETIONS, body)
        choices = [each["choices"][0] for each in (reply.events if stream else [reply.json])]
        whole = "".join(choice["text"] for choice in choices)
        rows = [
            row
            for choice in choices
            if choice["logprobs"]
            for row in zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True)
        ]
        of_prompt, (_, first) = rows[: -GREEDY["max_tokens"]], rows[-GREEDY["max_tokens"]]
        assert whole.startswith(text) and first == len(text) and "".join(token for token, _ in of_prompt) == text
        assert all(whole.startswith(token, at) for token, at in of_prompt)


def test_a_streamed_chat_tells_of_its_prompt_what_a_whole_one_does(url: str) -> None:
    body = {"messages": MESSAGES, "n": 2, "prompt_logprobs": 1, "return_token_ids": True, **GREEDY}
    whole = request(url, CHAT, body).json
    events = request(url, CHAT, {**body, "stream": True}).events
    for name in ("prompt_logprobs", "prompt_token_ids"):
        assert [event[name] for event in events if name in event] == [whole[name]] and whole[name], name
    assert "prompt_token_ids" in events[0]


def test_each_output_of_a_prompt_that_is_only_echoed_is_a_choice(url: str) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "echo": True, "max_tokens": 0}
    want = [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
    assert [(each["index"], each["text"]) for each in request(url, COMPLETIONS, body).json["choices"]] == want
    events = [event["choices"][0] for event in request(url, COMPLETIONS, {**body, "stream": True}).events]
    assert [(each["index"], each["text"]) for each in events if each["text"]] == want
    assert [each["index"] for each in events if each["finish_reason"] == "length"] == [0, 1, 2, 3]


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_only_echoed_is_bounded_as_what_generates(url: str, stream: bool) -> None:
    body = {"prompt": ["a"] * 64, "n": 128, "echo": True, "stream": stream}
    only, generating = (request(url, COMPLETIONS, {**body, "max_tokens": count}) for count in (0, 1))
    assert only.status == generating.status == 400 and only.error == generating.error
    assert "found 8192 sequences (prompts times n)" in only.error["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": [[5] * 100] * 4, "n": 128, "logprobs": 32}, "would report 1689600 tokens and likely tokens"),
        ({"prompt": [[5] * 100] * 4, "n": 128, "logprobs": 12, "prompt_logprobs": 10}, "would report 1331200 tokens"),
    ],
)
def test_an_answer_tells_no_more_of_prompts_than_is_documented(url: str, body: Any, message: str) -> None:
    reply = request(url, COMPLETIONS, {"echo": True, "max_tokens": 1, **body})
    assert reply.status == 400 and message in reply.error["message"]


def test_the_chosen_value_is_the_highest_exactly_where_the_token_is_greedy(url: str) -> None:
    """Evaluation harnesses compare the two over texts with tokens that are greedy and tokens that are not."""
    answer = request(url, COMPLETIONS, {"prompt": [5, 6, 7], "return_token_ids": True, **GREEDY}).json["choices"][0]
    text = [5, 6, 7, *answer["token_ids"]]
    scored = {"prompt": [text, [5, 6, 7, 8, 9]], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    first, second = (choice["logprobs"] for choice in request(url, COMPLETIONS, scored).json["choices"])
    is_greedy = [
        [
            value == max(top.values())
            for value, top in zip(rows["token_logprobs"][3:], rows["top_logprobs"][3:], strict=True)
        ]
        for rows in (first, second)
    ]
    assert is_greedy[0] == [True] * 9 and is_greedy[1][-1] and not all(is_greedy[1])


def test_a_scored_prompt_is_found_by_what_follows(url: str, served: str) -> None:
    """The prompt is found by the token that a harness asks for besides, and by other requests with its salt."""

    def cached(salt: str, **more: Any) -> int:
        reply = request(url, COMPLETIONS, {"prompt": [*range(5, 75)], "cache_salt": salt, **GREEDY, **more})
        return int(reply.json["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("harness", echo=True, logprobs=1) == 64
    assert cached("other") == 0
    with Client(served) as client:
        client.score([*range(5, 75)], cache_salt="by score")
        (*_, last) = client.generate([*range(5, 75)], prompt_logprobs=1, cache_salt="by prompt_logprobs", max_tokens=2)
        assert last.usage is not None and last.usage.cached_tokens == 64
        with pytest.raises(RequestError, match="cache_salt: expected a string of at most 256 characters"):
            client.score([5, 6], cache_salt="x" * 257)
    assert cached("by score") == 64


def test_a_salt_that_is_no_text_is_the_requests_own_fault(url: str, server: Server) -> None:
    """Half of a surrogate pair has no bytes to be hashed."""
    engine = server.engine.pid
    reply = request(url, COMPLETIONS, b'{"prompt": "abc", "cache_salt": "\\ud800"}')
    assert reply.status == 400 and reply.error["message"].startswith("cache_salt: it is not text")
    assert request(url, COMPLETIONS, {"prompt": "abc", **GREEDY}).status == 200
    assert server.engine.pid == engine


def test_usage_in_every_chunk(url: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": MESSAGES, "stream": True, "stream_options": options, **GREEDY}
    events = request(url, CHAT, body).events
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 8 and events[-1]["choices"] == []


def test_a_template_gets_variables(url: str, served: str) -> None:
    with_prompt = {"messages": MESSAGES, "add_generation_prompt": True}
    ids = request(url, "/tokenize", with_prompt).json["tokens"]
    without = request(url, "/tokenize", {**with_prompt, "add_generation_prompt": False}).json
    assert without["count"] < len(ids) and ids[: without["count"]] == without["tokens"]
    with Client(served) as client:
        assert client.tokenize(MESSAGES) == ids
    body = {
        "messages": MESSAGES,
        "chat_template_kwargs": {"enable_thinking": False, "is_prompt": 1, "variables": 2, "self": 3, "max_tokens": 4},
        "return_token_ids": True,
        **GREEDY,
    }
    assert request(url, CHAT, body).json["prompt_token_ids"] == ids
    for name in ("messages", "tools"):
        error = request(url, CHAT, {**body, "chat_template_kwargs": {name: []}}).error
        assert error["message"] == f"chat_template_kwargs: {name} is set by the request itself; leave it out"
    many = {"a": [[0.5] * 100] * 162}
    assert request(url, CHAT, {**body, "chat_template_kwargs": many}).status == 200
    error = request(url, CHAT, {**body, "chat_template_kwargs": {**many, "b": [{}] * 1000}}).error
    assert error["message"].startswith("chat_template_kwargs: it holds more than 16384 values; send what the template")


def test_a_conversation_is_tokenized_as_the_model_gets_it(url: str) -> None:
    more = {"messages": MESSAGES, "chat_template_kwargs": {"bos_token": "x"}}
    body = {**more, "return_token_ids": True, **GREEDY}
    with_variable = request(url, CHAT, body).json["prompt_token_ids"]
    assert request(url, "/tokenize", more).json["tokens"] == with_variable
    assert request(url, "/tokenize", {"messages": MESSAGES}).json["tokens"] != with_variable
    error = request(url, "/tokenize", {"messages": MESSAGES, "tools": [{"type": "function"}]}).error
    assert error["message"].startswith("tools[0].function: expected an object") and error["param"] == "tools"


def test_text_and_ids(url: str) -> None:
    found = request(url, "/tokenize", {"prompt": "def add(", "return_token_strs": True}).json
    assert (len(found["tokens"]), "".join(found["token_strs"])) == (found["count"], "def add(")
    assert request(url, "/detokenize", {"tokens": found["tokens"]}).json == {"prompt": "def add("}
    info = request(url, "/tokenizer_info").json
    assert (info["eos_token"], info["model_max_length"]) == ("</s>", 256) and "message" in info["chat_template"]
    assert "outside of the vocabulary" in request(url, "/detokenize", {"tokens": [1 << 40]}).error["message"]
    assert request(url, "/tokenize", {}).error["message"] == "prompt: expected one of prompt and messages"


def test_about_the_server(url: str) -> None:
    for method in ("GET", "HEAD"):  # `curl -I`, and load balancers
        assert [request(url, path, method=method).status for path in ("/health", "/live", "/ready")] == [200] * 3
    assert request(url, "/version").json["version"]
    described = request(url, "/openapi.json").json
    body = described["paths"][COMPLETIONS]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "prompt" in described["components"]["schemas"][body["$ref"].rpartition("/")[2]]["properties"]


# --------------------------------------------------------------------------------------------- bad requests

BAD: list[tuple[Any, str, str | None]] = [
    (b"{", "the body is not JSON: Expecting property name enclosed in double quotes", None),
    (b"", "the body is no JSON object; send one", None),
    (b"\xff\xfe", "", None),
    (b"[" * 100_000, "", None),
    ([], "the body is no JSON object", None),
    ({}, "prompt is missing; give it", "prompt"),
    ({"prompt": 5}, "prompt: expected a text, a list of token ids, or a list of either, found 5", "prompt"),
    ({"prompt": {"a": 1}}, "prompt: expected a text", "prompt"),
    ({"prompt": []}, "prompt: expected a text", "prompt"),
    ({"prompt": ["a", 5]}, "prompt: expected a text", "prompt"),
    ({"prompt": [2**70]}, "", None),
    (
        b'{"prompt": [' + b"1" * 5000 + b"]}",
        "the body is not JSON that is read here: Exceeds the limit (4300 digits)",
        None,
    ),
    (b'{"prompt": "a", "min_p": 1e400}', "min_p: expected a finite number, found inf", "min_p"),
    (b'{"prompt": "a", "min_p": ' + b"1" * 400 + b"}", "min_p is an integer of about 400 digits; expected", "min_p"),
    ({"prompt": ["a"] * 20 + [{"a": {}}]}, "prompt: expected a text", "prompt"),
    (
        {"prompt": "a", "stream_options": {"include_usage": 1}},
        "stream_options.include_usage: expected true or",
        "stream_options",
    ),
    ({"prompt": ["a"] * 2049}, "found 2049 prompts, at most 2048", "prompt"),
    ({"prompt": "a", "temperature": "hot"}, 'temperature: expected a number, found "hot"', "temperature"),
    ({"prompt": "a", "temperature": float("nan")}, "temperature: expected a finite number, found nan", "temperature"),
    ({"prompt": "a", "max_tokens": "5"}, 'max_tokens: expected an integer, found "5"', "max_tokens"),
    ({"prompt": "a", "max_tokens": 2.5}, "max_tokens: expected an integer, found 2.5", "max_tokens"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0; expected at least 1", "max_tokens"),
    ({"prompt": "a", "max_tokens": 2**80}, "", "max_tokens"),
    ({"prompt": "a", "n": 1000}, "n is 1000; expected at most 128", "n"),
    ({"prompt": "a", "logprobs": 99}, "logprobs is 99; expected at most 32", "logprobs"),
    ({"prompt": "a", "prompt_logprobs": 99}, "prompt_logprobs is 99; expected at most 32", "prompt_logprobs"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, 'logit_bias: a key is a token id, found "x"', "logit_bias"),
    ({"prompt": "a", "suffix": "b"}, 'suffix is "b", which is not built yet', "suffix"),
    ({"prompt": "a", "stream_options": 5}, "stream_options", "stream_options"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "and the answer is no stream", "stream_options"),
    ({"prompt": "a", "chat_template_kwargs": {"a": 1}}, "no chat template writes a plain", "chat_template_kwargs"),
    ({"prompt": "a", "add_generation_prompt": False}, "no chat template writes a plain", "add_generation_prompt"),
    ({"prompt": "a", "guided_regex": "(b"}, "guided_regex: Regex parsing error at position 3: The", "guided_regex"),
    ({"prompt": "a", "structural_tag": {"a": 1}}, "structural_tag: expected an object with a fo", "structural_tag"),
    ({"prompt": "a", "num_beams": 4}, "num_beams is 4, which is not built yet", "num_beams"),
    ({"prompt": "a", "length_penalty": 0.5}, "length_penalty is 0.5, which a beam search reads", "length_penalty"),
    ({"prompt": "a", "detokenize": False}, "detokenize is false, which is not built yet", "detokenize"),
    ({"prompt": "half a pair \ud83d"}, "the prompt is not text", None),
    ({"prompt": "a", "cache_salt": "half \ud83d"}, "cache_salt: it is not text", "cache_salt"),
    ({"prompt": "a", "model": "half \ud83d"}, "is not served here", None),
]


@pytest.mark.parametrize(("body", "message", "param"), BAD)
def test_a_bad_completion_is_told_what_is_wrong(url: str, body: Any, message: str, param: str | None) -> None:
    reply = request(url, COMPLETIONS, body)
    assert reply.status == (404 if isinstance(body, dict) and "model" in body else 400)
    error = reply.error
    assert error["message"].startswith(message) or message in error["message"]
    assert "\n" not in error["message"] and "Traceback" not in error["message"] and len(error["message"]) < 400
    assert param is None or error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages: expected a list of at least one message"),
        ("hi", 'messages: expected a list, found "hi"'),
        ([{"role": "user"}], "messages[0].content: expected text, found null"),
        ([{"content": "hi"}], "messages[0]: expected an object with a role and a content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content: expected text, found null"),
        (
            [{"role": "user", "content": "5", "tool_call_id": "x"}],
            'messages[0].tool_call_id is "x", which is not built',
        ),
    ],
)
def test_a_bad_chat_is_told_what_is_wrong(url: str, messages: Any, message: str) -> None:
    reply = request(url, CHAT, {"messages": messages})
    assert reply.status == 400 and reply.error["message"].startswith(message)
    assert reply.error["param"] == "messages"


UNKNOWN = {"temperture": 0.5, "repeat_penalty": 1.1, "frobnicate": None}
WARNINGS = [
    "temperture is not known and was ignored; did you mean temperature?",
    "repeat_penalty is not known and was ignored; did you mean repetition_penalty?",
    "frobnicate is not known and was ignored",
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_field_that_is_not_known_is_named_in_the_answer(url: str, path: str, stream: bool) -> None:
    asked = {"prompt": "a"} if path == COMPLETIONS else {"messages": MESSAGES}
    body = {**asked, **GREEDY, "stream": stream}
    found, plain = request(url, path, {**body, **UNKNOWN}), request(url, path, body)
    if not stream:
        assert found.json["warnings"] == WARNINGS and "warnings" not in plain.json
        return
    assert [event["warnings"] for event in found.events if "warnings" in event] == [WARNINGS]
    assert "warnings" in found.events[0] and not any("warnings" in event for event in plain.events)
    texts = [
        "".join(each.get("text", each.get("delta", {}).get("content")) for each in (e["choices"][0] for e in events))
        for events in (found.events, plain.events)
    ]
    assert texts[0] == texts[1]


def test_fields_that_change_nothing_here_pass_without_a_word(url: str) -> None:
    """OpenAI's clients and those of other servers send them with every request."""
    body = {
        "messages": MESSAGES,
        **GREEDY,
        "reasoning_effort": "high",
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "service_tier": "auto",
        "store": False,
        "verbosity": "low",
        "prediction": {"type": "content", "content": "an answer that is probably this"},
        "prompt_cache_key": "a",
        "safety_identifier": "b",
        "metadata": {"a": "b"},
        "cache_prompt": True,
    }
    reply = request(url, CHAT, body)
    assert reply.status == 200 and "warnings" not in reply.json, reply.body
    assert reply.json["choices"] == request(url, CHAT, {"messages": MESSAGES, **GREEDY}).json["choices"]


def test_the_name_of_who_speaks_is_told_to_be_left_out(url: str) -> None:
    """Clients for several agents send it with every message, and few templates write it."""
    named = [{**MESSAGES[0], "name": "alice"}, *MESSAGES[1:]]
    reply = request(url, CHAT, {"messages": named, **GREEDY})
    assert reply.json["warnings"] == [NAME_IGNORED]
    assert reply.json["choices"] == request(url, CHAT, {"messages": MESSAGES, **GREEDY}).json["choices"]
    error = request(url, CHAT, {"messages": [{**MESSAGES[0], "name": 5}]}).error
    assert error["message"] == "messages[0].name: expected a text, found 5"


@pytest.mark.parametrize(
    ("template", "is_read"),
    [
        ("{{ message.name }}", True),
        ("{{ message['name'] }}: {{ message['content'] }}", True),
        ('{% if messages[0]["name"] %}', True),
        ("{{ m.get('name') }}", True),
        ("{{ tool.function.name }} {{ message.tool_calls[0].function.name }}", False),
        ("{{ message.names }} {{ tool_call['name'] }}", False),
    ],
)
def test_a_template_that_writes_names_is_told_from_one_that_does_not(template: str, is_read: bool) -> None:
    assert bool(READS_NAME.search(template)) == is_read


def test_what_is_wrong_before_the_first_token_is_no_stream(url: str) -> None:
    reply = request(url, COMPLETIONS, {"prompt": [5] * 300, "stream": True})
    assert reply.status == 400 and "the prompt has 300 tokens" in reply.error["message"]


def test_a_slash_at_the_end_of_a_path_changes_nothing(url: str) -> None:
    """Behind a proxy that ends TLS a redirect would lead to plain HTTP."""
    assert request(url, f"{COMPLETIONS}/", {"prompt": "a", **GREEDY}).json["choices"]
    for path in ("/v1/models", "/health", "/version", "/metrics"):
        assert request(url, f"{path}/").status == 200, path
    assert request(url, "/v1/models/").json == request(url, "/v1/models").json


def test_paths_and_methods_that_are_none(url: str) -> None:
    for path, hint in (
        ("/v1/files", "/openapi.json lists those that there are"),
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/v1/messages", "did you mean /v1/messages?"),
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
    ):
        reply = request(url, path, {})
        assert reply.status == 404 and reply.error["message"] == f'there is no path "{path}" here; {hint}'
    assert request(url, "/" + "a" * 9000).status == 404
    reply = request(url, COMPLETIONS)
    assert reply.status == 405 and reply.error["message"] == '"/v1/completions" takes POST, found GET'
    assert reply.headers["allow"] == "POST"
    assert request(url, "/v1/models/none").status == 404
    assert request(url, "/v1/nothing/").status == 404
    for given, found in (("text/plain", 'content-type is "text/plain"'), ("", "the header content-type is missing")):
        reply = request(url, COMPLETIONS, b'{"prompt": "a"}', {"content-type": given})
        assert reply.status == 400 and reply.error["message"] == f"{found}; send content-type: application/json"
    for encoding, status in (("gzip", 415), ("identity", 400)):
        reply = request(url, COMPLETIONS, b"{}", {"content-encoding": encoding})
        assert reply.status == status


def test_request_ids_are_echoed_or_made(url: str) -> None:
    for given in ("mine", "a-b.c:d"):
        assert request(url, "/version", headers={"x-request-id": given}).headers["x-request-id"] == given
    for none in ("", "two words", "x" * 200, "a\tb"):
        made = request(url, "/version", headers={"x-request-id": none}).headers["x-request-id"]
        assert made.startswith("req-") and len(made) == 28
    ids = [request(url, COMPLETIONS, {"prompt": "a", "max_tokens": 1}, {"x-request-id": "same"}) for _ in range(2)]
    assert all(reply.status == 200 for reply in ids)
    assert request(url, "/v1/nothing").headers["x-request-id"], "on errors too"


def raw(url: str, data: bytes) -> bytes:
    with socket.create_connection(urlsplit(url).netloc.split(":"), timeout=20) as connection:  # type: ignore[arg-type]
        connection.sendall(data)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
        return b"".join(parts)


def test_bodies_that_are_too_large(url: str) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    answer = raw(url, head + b"content-length: 99999999999\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413") and b"the body has more than 67108864 bytes" in answer


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", b""),
        (b"GET /health HTTP/1.1\r\nx-a: ", b"408"),
        (HEAD + b"content-length: 1000\r\n\r\n{", b"408"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n", b"408"),
        (b"GET /health HTTP/1.1\r\n" + b"x-a: b\r\n" * 100_000, b"431"),
        (b"GET /health HTTP/1.1\r\nx-a: " + b"b" * 1_000_000, b"431"),
        (b"GET /" + b"b" * 1_000_000, b"431"),
        # In one piece, or in two, and so little too much that a larger buffer would let it pass.
        (b"GET /health HTTP/1.1\r\nx-a: " + b"b" * 66_000 + b"\r\n\r\n", b"431"),
        (b"GET /health HTTP/1.1\r\nx-a: " + b"b" * 66_000, b"431"),
        (b"GET /" + b"b" * 66_000 + b" HTTP/1.1\r\n\r\n", b"431"),
        (b"GET /health HTTP/1.1\r\n" + b"x-a: b\r\n" * 9_000 + b"\r\n", b"431"),
        (b"GET /health HTTP/1.1\r\nconnection: close\r\nx-a: " + b"b" * 60_000 + b"\r\n\r\n", b"200"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nx-a: " + b"b" * 1_000_000, b"431"),
    ],
)
def test_who_sends_next_to_nothing_or_heads_without_end_holds_no_place(
    sent: bytes, status: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_protocol, "LOOK_SECONDS", 0.3)
    models: Any = SimpleNamespace(is_serving=True)
    metrics: Any = SimpleNamespace(responses=Counter())

    async def talk() -> bytes:
        listener = http_address.bind("127.0.0.1", 0)
        server = HttpServer(make_app(models, metrics, Access()), listener)
        running = asyncio.create_task(server.run_until_stopped())
        reader, writer = await asyncio.open_connection(*http_address.name_of(listener).split(":"))
        parts = []
        with suppress(ConnectionError):
            size = 10_000 if len(sent) > 100_000 else len(sent) or 1
            for start in range(0, len(sent), size):  # as a client that reads nothing meanwhile
                writer.write(sent[start : start + size])
                await writer.drain()
        with suppress(ConnectionError):
            while part := await asyncio.wait_for(reader.read(65536), 10):
                parts.append(part)
        writer.close()
        server.stop()
        await running
        listener.close()
        return b"".join(parts)

    answer = asyncio.run(talk())
    # What was sent and not read may cost the client the answer.
    is_lost = not answer and status == b"431" and len(sent) > 100_000
    assert is_lost or status in answer[:20] and (answer or not status)
    assert "Traceback" not in caplog.text


def test_a_large_body_that_comes_slowly_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between any two pieces of it the server looks whether enough came since it looked last."""
    take = http_protocol.Protocol.data_received
    taken: asyncio.Queue[tuple[http_protocol.Protocol, int]] = asyncio.Queue()

    def data_received(self: http_protocol.Protocol, data: bytes) -> None:
        take(self, data)
        taken.put_nowait((self, len(data)))

    monkeypatch.setattr(http_protocol.Protocol, "data_received", data_received)
    models: Any = SimpleNamespace(is_serving=True)
    metrics: Any = SimpleNamespace(responses=Counter())

    async def talk() -> bytes:
        listener = http_address.bind("127.0.0.1", 0)
        server = HttpServer(make_app(models, metrics, Access()), listener)
        running = asyncio.create_task(server.run_until_stopped())
        reader, writer = await asyncio.open_connection(*http_address.name_of(listener).split(":"))
        head, num_taken = HEAD + b"content-length: 320000\r\n\r\n", 0
        writer.write(head)
        for number in range(10):
            writer.write(b" " * 32_000)
            while num_taken < len(head) + 32_000 * (number + 1):
                protocol, count = await asyncio.wait_for(taken.get(), 10)
                num_taken += count
            if number < 9:
                protocol._stop_looking()  # the next look is now, and not when it is due
                protocol._look()
        answer = await asyncio.wait_for(reader.read(65536), 10)
        writer.close()
        server.stop()
        await running
        listener.close()
        return answer

    assert b"the body is not JSON" in asyncio.run(talk())


def test_what_nobody_expected_is_an_object_that_tells_nothing() -> None:
    class Broken:
        @property
        def served(self) -> Any:
            raise ValueError("/etc/secret")

    models: Any = Broken()
    metrics: Any = SimpleNamespace(responses=Counter())
    app, sent = make_app(models, metrics, Access()), []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/v1/models", "raw_path": b"/v1/models", "root_path": ""}
    asyncio.run(app({**scope, "query_string": b"", "headers": [], "scheme": "http"}, receive, send))
    assert sent[0]["status"] == 500 and dict(sent[0]["headers"])[b"content-type"] == b"application/json"
    error = json.loads(sent[1]["body"])["error"]
    assert error["type"] == "server_error" and "secret" not in error["message"]


def test_what_is_no_http(url: str) -> None:
    assert raw(url, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert request(url, "/health").status == 200
