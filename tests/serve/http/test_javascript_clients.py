"""The OpenAI interface by clients in JavaScript, all unmodified: OpenAI's own, and Vercel's AI SDK."""

import json
from pathlib import Path
from typing import Any

import pytest
from clients import run_node_client
from http_calls import request
from serving import Server, wait_until
from tool_models import check_arguments

pytestmark = pytest.mark.slow

NO_CALLS = "the model's chat template does not tell how it writes calls"
PROVIDERS = ("chat", "responses", "compatible")


# ------------------------------------------------------------------------------------------- OpenAI's client


@pytest.fixture(scope="module")
def node(url: str, tiny_artifact: Path) -> Any:
    return run_node_client("check_openai.mjs", url, tiny_artifact.name)


def test_javascript_completes_and_streams(node: Any, tiny_artifact: Path) -> None:
    content = node["chat"]["choices"][0]["message"]["content"]
    stream = node["stream"]
    assert node["models"] == [tiny_artifact.name] and node["request_id"].startswith("req-") and node["left"]
    assert "".join(stream["pieces"]) == content and len(stream["pieces"]) > 2
    assert stream["reasons"] == ["length"] and stream["usage"]["completion_tokens"] == 12
    assert node["helped"] == [content, content] and node["together"] == [content] * 8
    assert node["completion"]["choices"][0]["text"]
    assert node["responses"]["kinds"][0] == "response.created" and node["responses"]["text"]
    assert node["responses"]["kinds"][-1] in ("response.completed", "response.incomplete")


def test_javascript_gets_answers_of_a_form(node: Any) -> None:
    assert json.loads(node["structured"])["verdict"] in ("yes", "no")
    assert "".join(node["structured_stream"]) == node["structured"] and len(node["structured_stream"]) > 2


def test_javascript_raises_its_own_errors(node: Any) -> None:
    errors = node["errors"]
    for name in ("tools", "run_tools"):
        assert errors[name][:2] == ["BadRequestError", 400] and errors[name][3] == "tools"
        assert NO_CALLS in errors[name][2]
    assert errors["schema"][:2] == ["BadRequestError", 400] and errors["schema"][3] == "response_format"
    assert errors["model"][:2] == ["NotFoundError", 404] and errors["model"][4] == "model_not_found"
    assert errors["embeddings"][:2] == ["BadRequestError", 400]


@pytest.fixture(scope="module")
def tools(tooled: Server) -> Any:
    return run_node_client("check_openai_tools.mjs", tooled.url, "tooled")


def check_call(call: Any) -> None:
    """Check a call that the client has read by the schema of its tool."""
    assert call["name"] == "get_weather" and call["parsed_arguments"] == json.loads(call["arguments"])
    check_arguments("get_weather", call["parsed_arguments"])


def test_javascript_reads_calls_by_their_schemas(tools: Any) -> None:
    chats, responses = tools["chats"], tools["responses"]
    check_call(chats["call"])
    assert chats["streamed"] == chats["call"] and chats["reason"] == "tool_calls"
    assert chats["deltas"] == chats["done"] == chats["call"]["arguments"]
    assert set(chats["contents"]) == {None}, "no chunk says that there is a text beside the call"
    check_call(responses["call"])
    assert responses["call"]["status"] == "completed" and responses["deltas"] == responses["call"]["arguments"]
    assert responses["streamed"] == responses["call"]["parsed_arguments"]
    for found in (chats["formed"], responses["formed"]):
        assert found["verdict"] in ("yes", "no") and 0 <= found["count"] <= 9


def test_javascript_sends_what_it_has_read_back(tools: Any) -> None:
    """Objects of answers that it has read have `parsed_arguments` besides, and go back with the next request whole."""
    responses = tools["responses"]
    assert responses["then"] and responses["usage"]["output_tokens"] <= 12
    assert responses["counted"] == {
        "object": "response.input_tokens",
        "input_tokens": responses["usage"]["input_tokens"],
    }


@pytest.mark.parametrize("name", ["run", "run_stream"])
def test_javascript_runs_tools_by_itself(tools: Any, name: str) -> None:
    found = tools[name]
    assert found["roles"] == ["user", "assistant", "tool", "assistant", "tool"] and len(found["called"]) == 2
    for city, days in found["called"]:
        check_arguments("get_weather", {"city": city, "days": days})
    assert found["called"] == tools["run"]["called"] and tools["run"]["usage"]["completion_tokens"] > 0


# ------------------------------------------------------------------------------------------- Vercel's AI SDK


@pytest.fixture(scope="module")
def sdk(tooled: Server) -> Any:
    return run_node_client("check_ai.mjs", tooled.url, "tooled")


@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_ai_sdk_calls_tools_and_goes_on(sdk: Any, provider: str) -> None:
    """One step has a call, which it answers by itself, and the next one has the text; streamed it is the same."""
    seen = sdk[provider]
    (reason, (arguments,), said), (then, calls, text) = seen["steps"]
    assert (reason, said, calls) == ("tool-calls", "", []) and then in ("stop", "length")
    check_arguments("get_weather", arguments)
    assert seen["called"] == [arguments] * 2 and text and seen["text"] == text
    stream = seen["stream"]
    assert stream["text"] == text and stream["steps"] == 2
    begins, ends = ["start-step"], ["finish-step"]
    call = [f"tool-{each}" for each in ("input-start", "input-delta", "input-end", "call", "result")]
    spoken = ["text-start", "text-delta", "text-end"]
    assert stream["kinds"] == ["start", *begins, *call, *ends, *begins, *spoken, *ends, "finish"]
    for name in ("inputTokens", "outputTokens", "totalTokens"):
        assert seen["usage"][name] == stream["usage"][name] > 0
    assert {"tools", "tool_choice", "parallel_tool_calls", "stream"} <= set(seen["fields"])


@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_ai_sdk_gets_objects(sdk: Any, provider: str) -> None:
    seen = sdk[provider]
    first, *others = seen["objects"]
    assert first["verdict"] in ("yes", "no") and 0 <= first["count"] <= 9
    assert others == [first] * 5, "whole and streamed, and by its older functions"
    assert seen["choice"] in ("left", "right") and set(seen["array"]) <= {"a", "b"} and seen["any"] == "object"


@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_ai_sdk_raises_its_own_errors(sdk: Any, provider: str) -> None:
    errors = sdk[provider]["errors"]
    for name, status, message in (("model", 404, "is not served here"), ("image", 400, "this model takes ")):
        assert errors[name][:2] == ["AI_APICallError", status] and message in errors[name][2]
        assert errors[name][3] is False, "it does not try again"


def test_the_ai_sdk_leaves_in_the_middle(sdk: Any, tooled: Server) -> None:
    assert all(sdk[provider]["left"] for provider in PROVIDERS)
    wait_until(lambda: request(tooled.url, "/requests").json["requests"] == [], "who left is gone")


def test_the_ai_sdk_completes(sdk: Any) -> None:
    found = sdk["completed"]
    assert found["text"] and found["usage"]["outputTokens"] == 6 and found["usage"]["inputTokens"] > 6
