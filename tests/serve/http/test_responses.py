"""The Responses API: by OpenAI's client, and as it goes over the wire."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from clients import run_client
from http_calls import Reply, request
from serving import wait_until

from inferc.client import Client
from inferc.runtime.openai.answer import Usage
from inferc.runtime.openai.responses import parse_response_request
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.serve.answering.entry_limits import MAX_ENTRIES, check_likely
from inferc.serve.errors import EngineUnavailable
from inferc.serve.http.responses_api import _ResponseForm
from inferc.serve.models.streams import Delta

RESPONSES = "/v1/responses"
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_output_tokens": 8, "ignore_eos": True}
BEGIN = ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
END = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]


def events(body: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream, each of which is named as its type; nothing follows the last."""
    found = []
    *blocks, rest = body.decode().split("\n\n")
    assert rest == ""
    for block in blocks:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


# ------------------------------------------------------------------------------------------------- OpenAI's client


@pytest.fixture(scope="module")
def seen(url: str, tiny_artifact: Any) -> Any:
    return run_client("openai", "check_responses.py", url, tiny_artifact.name)


@pytest.mark.slow
def test_openai_gets_what_a_chat_says(seen: Any, tiny_artifact: Any) -> None:
    chat, response = seen["chat"]["choices"][0]["message"]["content"], seen["response"]
    assert response["output_text"] == chat and response["model"] == tiny_artifact.name
    assert (response["object"], response["status"]) == ("response", "incomplete")
    assert response["incomplete_details"] == {"reason": "max_output_tokens"} and response["id"].startswith("resp_")
    (item,) = response["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    assert item["id"].startswith("msg_") and item["content"][0]["annotations"] == []
    usage, counted = response["usage"], seen["chat"]["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (counted["prompt_tokens"], counted["completion_tokens"])
    assert (
        usage["total_tokens"] == usage["input_tokens"] + 12 and usage["output_tokens_details"]["reasoning_tokens"] == 0
    )
    assert (response["metadata"], response["user"], response["store"]) == ({"a": "b"}, "me", False)
    assert (response["temperature"], response["max_output_tokens"]) == (0.0, 12)
    assert seen["plain"]["output_text"] == chat


@pytest.mark.slow
def test_openai_sends_a_conversation(seen: Any) -> None:
    """Instructions and what a developer says first are the template's one system message."""
    assert seen["turns"]["output_text"] == seen["turns_chat"]["choices"][0]["message"]["content"]
    assert seen["turns"]["usage"]["input_tokens"] == seen["turns_chat"]["usage"]["prompt_tokens"]
    assert seen["again"]["output_text"], "its own output is input"


@pytest.mark.slow
def test_openai_sees_an_answer_that_ended(seen: Any) -> None:
    stopped = seen["stopped"]
    assert (stopped["status"], stopped["incomplete_details"]) == ("completed", None)
    assert stopped["output_text"] and seen["response"]["output_text"].startswith(stopped["output_text"])
    assert seen["helper"] == [stopped["output_text"]] * 2


@pytest.mark.slow
def test_openai_streams(seen: Any) -> None:
    stream, text = seen["stream"], seen["response"]["output_text"]
    assert stream["kinds"][:4] == BEGIN and stream["kinds"][-4:] == [*END, "response.incomplete"]
    assert set(stream["kinds"][4:-4]) == {"response.output_text.delta"}
    assert stream["numbers"] == list(range(len(stream["kinds"])))
    assert "".join(stream["deltas"]) == text and stream["done"] == [text]
    added, done = stream["items"]
    assert (added["content"], added["status"]) == ([], "in_progress") and added["id"] == done["id"]
    assert stream["last"]["output"] == [done] and stream["last"]["usage"]["output_tokens"] == 12


@pytest.mark.slow
def test_openai_gets_log_probabilities(seen: Any) -> None:
    rows = seen["chat"]["choices"][0]["logprobs"]["content"]
    assert seen["logprobs"]["output"][0]["content"][0]["logprobs"] == rows and len(rows) == 12
    streamed = seen["logprobs_stream"]["last"]["output"][0]["content"][0]["logprobs"]
    assert [row["logprob"] for row in streamed] == [row["logprob"] for row in rows]
    assert seen["response"]["output"][0]["content"][0]["logprobs"] == []


@pytest.mark.slow
def test_openai_raises_its_own_errors(seen: Any) -> None:
    errors = seen["errors"]
    assert errors["model"][:2] == ["NotFoundError", 404]
    assert errors["tools"][:2] == ["BadRequestError", 400] and errors["tools"][3] == "tools"
    assert errors["previous"][1] == 400 and "nothing is stored here; send all of it as input" in errors["previous"][2]
    assert errors["long"][:2] == ["BadRequestError", 400] and "the prompt has" in errors["long"][2]
    for name in ("retrieve", "delete", "cancel", "input_items"):
        assert errors[name][:2] == ["NotFoundError", 404] and "nothing is stored here" in errors[name][2]


@pytest.mark.slow
def test_openai_runs_many_at_once(seen: Any, served: str) -> None:
    assert len(seen["async"]["streams"]) == 16 and all(seen["async"]["streams"])
    assert seen["async"]["whole"] == seen["response"]["output_text"]
    with Client(served) as client:
        wait_until(lambda: client.loads().num_requests == 0, "who left is gone")


# ------------------------------------------------------------------------------------------------------ the wire


def ask(url: str, **body: Any) -> Reply:
    return request(url, RESPONSES, {"input": "Hi", **GREEDY, **body})


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({"input": None}, "input: expected a text or a list of at least one item, found null", "input"),
        ({"input": []}, "input: expected a text or a list of at least one item, found []", "input"),
        ({"input": [5]}, "input[0]: expected an object, found 5", "input"),
        ({"input": [{"role": "user"}]}, "input[0].content: expected a text or a list of parts, found null", "input"),
        ({"input": [{"role": "tool", "content": "a"}]}, 'input[0]: its role is "tool"; expected one of user,', "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
            'input[0].content: this model takes input_text and output_text only, found "input_image"',
            "input",
        ),
        ({"input": [{"type": "web_search_call"}]}, 'items of type "web_search_call" are not built', "input"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].arguments: expected a text", "input"),
        (
            {"input": [{"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image"}]}]},
            "input[0].output: this model takes input_text and output_text only",
            "input",
        ),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "refers to an item that was stored", "input"),
        ({"input": [{"role": "user", "content": "a", "name": "b"}]}, 'input[0].name is "b", which is not', "input"),
        ({"max_output_tokens": 0}, "max_output_tokens is 0; expected at least 1", "max_output_tokens"),
        ({"temperature": -1.0}, "temperature is -1.0", "temperature"),
        ({"conversation": "conv_1"}, 'conversation is "conv_1", and nothing is stored here', "conversation"),
        ({"background": True}, "background is true, which is not built yet; leave it out", "background"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort: expected a text, found 3", "reasoning"),
        ({"text": {"format": {"type": "json"}}}, 'text.format.type is "json"; known: text, json_object', "text"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a"}}},
            "text.format.schema is missing",
            "text",
        ),
        ({"truncation": "auto"}, 'truncation is "auto", which is not built yet', "truncation"),
        ({"tool_choice": "required"}, 'tool_choice is "required", and there are no tools', "tool_choice"),
        ({"include": ["nothing"]}, 'include: "nothing" is unknown; known: message.output_text.logprobs', "include"),
        ({"top_logprobs": 2}, "top_logprobs is 2, and include has no message.output_text.logprobs", "top_logprobs"),
        ({"top_logprobs": 99}, "top_logprobs is 99; expected at most 32", "top_logprobs"),
        ({"logprobs": True}, "logprobs is true, which is not built yet", "logprobs"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages is [", "messages"),
        ({"n": 2}, "n is 2, which is not built yet", "n"),
        ({"instructions": "\ud800"}, "instructions: it is not text", "instructions"),
        ({"user": "\ud800"}, "user: it is not text: it has half of a surrogate pair", "user"),
        ({"metadata": {"\ud800": "a"}}, "metadata: it is not text", "metadata"),
        ({"metadata": {"a": "\ud800"}}, "metadata: it is not text", "metadata"),
        *(
            ({name: 10**399}, f"{name} is an integer of about 400 digits; expected", name)
            for name in ("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "ttft_ms", "tbt_ms")
        ),
        ({"logit_bias": {"1": 10**399}}, "logit_bias[1] is an integer of about 400 digits", "logit_bias"),
        ({"metadata": {"a": 5}}, "metadata.a: expected a text, found 5", "metadata"),
        ({"metadata": dict.fromkeys(map(str, range(17)), "")}, "metadata: found 17 entries, at most 16", "metadata"),
        ({"metadata": {"a" * 65: ""}}, "metadata: found a text of 65 characters, at most 64 are allowed", "metadata"),
        ({"metadata": {"a": "b" * 513}}, "metadata: found a text of 513 characters, at most 512", "metadata"),
        ({"user": "a" * 513}, "user: found a text of 513 characters, at most 512 are allowed", "user"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong(url: str, body: dict[str, Any], message: str, param: str) -> None:
    for stream in (False, True):
        reply = ask(url, **body, stream=stream)
        assert reply.status == 400 and message in reply.error["message"], reply.body
        assert (reply.error["type"], reply.error["param"]) == ("invalid_request_error", param)


def test_a_missing_input_is_told(url: str) -> None:
    assert request(url, RESPONSES, {}).error["message"] == "input is missing; give it"


def test_what_asks_for_no_more_than_there_is_passes(url: str) -> None:
    plain = ask(url).json
    more = ask(
        url,
        reasoning={"effort": None, "summary": None},
        text={"format": {"type": "text"}, "verbosity": "low"},
        include=["reasoning.encrypted_content"],
        tools=[],
        tool_choice="none",
        parallel_tool_calls=False,
        truncation="disabled",
        background=False,
        previous_response_id=None,
        stream_options={"include_obfuscation": False},
        service_tier="auto",
        nobody_knows_this=5,
    ).json
    assert more["output"][0]["content"] == plain["output"][0]["content"] and more["id"] != plain["id"]
    assert (plain["parallel_tool_calls"], more["parallel_tool_calls"]) == (True, False), "it comes back as it was said"


def test_sampling_parameters_of_chats(url: str) -> None:
    one, two, three = (ask(url, temperature=1.0, seed=seed).json["output"][0]["content"] for seed in (1, 1, 2))
    assert one == two != three


def test_a_stream_over_the_wire(url: str) -> None:
    whole, reply = ask(url).json, ask(url, stream=True)
    assert reply.headers["content-type"].startswith("text/event-stream") and reply.headers["x-request-id"]
    found = events(reply.body)
    assert [event["type"] for event in found[:4]] == BEGIN
    assert found[0]["response"]["status"] == "in_progress" and found[0]["response"]["usage"] is None
    last = found[-1]["response"]
    assert found[-1]["type"] == "response.incomplete" and last["id"] == found[0]["response"]["id"]
    assert last["output"][0]["content"] == whole["output"][0]["content"]
    assert last["usage"]["output_tokens"] == 8
    request_id = {"x-request-id": "mine"}
    assert request(url, RESPONSES, {"input": "Hi", **GREEDY}, request_id).headers["x-request-id"] == "mine"


def test_responses_are_counted(url: str) -> None:
    ask(url)
    page = request(url, "/metrics").body.decode()
    assert 'inferc_http_responses_total{path="/v1/responses",status="200"}' in page


# --------------------------------------------------------------------------------------------- what goes wrong late


class Failing:
    """A request that says something, then fails."""

    calls = None
    may_reason = False
    request = parse_response_request({"input": "a"}).chat

    def __init__(self, num_pieces: int, num_likely: int = 0) -> None:
        self.params = SamplingParams(temperature=0.5)
        self.num_pieces, self.is_closed = num_pieces, False
        self._num_likely = num_likely

    async def deltas(self) -> AsyncGenerator[tuple[int, int, Delta], None]:
        for number in range(self.num_pieces):
            yield 0, 0, Delta(0, f"{number} ", [5], None, [])
        raise EngineUnavailable("the engine died of \ud800")

    def usage_of(self, number: int, count: int) -> Usage:
        return Usage(3, 1, count)

    def num_before(self, index: int, is_whole: bool = False) -> int:
        return 0

    def num_likely(self, piece: Delta) -> int:
        return self._num_likely

    def check_likely(self, num_entries: int) -> None:
        check_likely(num_entries, ())

    def token(self, token_id: int) -> tuple[str, list[int]]:
        return "a", [97]

    def close(self) -> None:
        self.is_closed = True


def test_a_response_that_fails_says_so_in_its_stream() -> None:
    failing = Failing(2)

    async def work() -> bytes:
        form: Any = _ResponseForm("1", 2, "m", parse_response_request({"input": "a"}))
        return b"".join([each async for each in form.events(failing)])

    found = events(asyncio.run(work()))
    assert [event["type"] for event in found] == [*BEGIN, *["response.output_text.delta"] * 2, "response.failed"]
    last = found[-1]["response"]
    assert (last["status"], last["error"]["code"]) == ("failed", "server_error")
    assert last["error"]["message"] == "the engine died of \\ud800"
    assert last["output"][0]["content"][0]["text"] == "0 1 " and last["usage"]["output_tokens"] == 2
    assert failing.is_closed


def test_a_response_with_more_likely_tokens_than_one_tells_fails() -> None:
    """The end of the stream has all of them once more."""
    failing = Failing(4, MAX_ENTRIES // 2)

    async def work() -> bytes:
        form: Any = _ResponseForm("1", 2, "m", parse_response_request({"input": "a"}))
        return b"".join([each async for each in form.events(failing)])

    found = events(asyncio.run(work()))
    assert [event["type"] for event in found] == [*BEGIN, *["response.output_text.delta"] * 2, "response.failed"]
    assert "ask for" in found[-1]["response"]["error"]["message"] and failing.is_closed


def test_what_fails_before_anything_came_is_no_stream() -> None:
    failing = Failing(0)

    async def work() -> None:
        form: Any = _ResponseForm("1", 2, "m", parse_response_request({"input": "a"}))
        await anext(form.events(failing))

    with pytest.raises(EngineUnavailable):
        asyncio.run(work())
    assert failing.is_closed


def test_instructions_come_first() -> None:
    found = parse_response_request({"input": "Hi", "instructions": "Be kind."})
    assert found.chat.prompts == ([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}],)
