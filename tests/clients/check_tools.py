"""Print what OpenAI's client and LangChain see of a server whose model calls tools: python check_tools.py URL MODEL.

OpenAI's client asks for chats and for responses.
"""

import json
import sys
from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from openai import OpenAI, pydantic_function_tool
from openai.types.responses import Response
from pieces import in_pieces
from pydantic import BaseModel, Field

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Paris"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER, "strict": True}}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "get_weather"}}
# The events of parts of a call's arguments.
OF_CHATS, OF_RESPONSES = "tool_calls.function.arguments.delta", "response.function_call_arguments.delta"
OPTIONS: dict[str, Any] = {"temperature": 1, "seed": 5, "max_tokens": 120}


class GetWeather(BaseModel):
    """The weather in a city."""

    days: int = Field(ge=1, le=9)


def openai_sees(client: OpenAI, model: str) -> dict[str, Any]:
    """Return calls, whole and streamed, and the end of a conversation in which one was answered."""
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    asked: dict[str, Any] = {"model": model, "messages": messages, "tools": [TOOL], "tool_choice": NAMED, **OPTIONS}
    asked["parallel_tool_calls"] = False
    whole = client.chat.completions.create(**asked).choices[0]

    def streamed() -> tuple[list[str], Any]:
        with client.chat.completions.stream(**asked) as stream:
            return [event.type for event in stream], stream.get_final_completion().choices[0]

    events, final = in_pieces(streamed, lambda found: found[0].count(OF_CHATS), 2)
    (call,) = whole.message.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    then = [*messages, whole.message.model_dump(exclude_none=True), result]
    answered = client.chat.completions.create(**{**asked, "messages": then, "tool_choice": "none"}).choices[0]
    return {
        "reason": whole.finish_reason,
        "content": whole.message.content,
        "arguments": call.function.arguments,
        "streamed": [each.function.arguments for each in final.message.tool_calls or []],
        "parsed": [each.function.parsed_arguments for each in final.message.tool_calls or []],
        "num_deltas": events.count(OF_CHATS),
        "answered": [answered.message.content, answered.message.tool_calls, answered.finish_reason],
    }


def responses_see(client: OpenAI, model: str) -> dict[str, Any]:
    """Return calls of responses, whole and streamed, and the end of a conversation in which one was answered."""
    tool: Any = {"type": "function", **TOOL["function"]}
    asked: dict[str, Any] = {"model": model, "input": "hi", "tools": [tool], "temperature": 1}
    asked.update(extra_body={"seed": 5}, max_output_tokens=120, parallel_tool_calls=False)
    asked["tool_choice"] = {"type": "function", "name": "get_weather"}
    whole = client.responses.create(**asked)
    Response.model_validate_json(whole.to_json())

    def streamed() -> tuple[list[str], Any]:
        with client.responses.stream(**asked) as stream:
            return [event.type for event in stream], stream.get_final_response()

    kinds, final = in_pieces(streamed, lambda found: found[0].count(OF_RESPONSES), 2)
    (call,) = whole.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    then: list[Any] = [{"role": "user", "content": "hi"}, call.model_dump(exclude_none=True), result]
    answered = client.responses.create(**{**asked, "input": then, "tool_choice": "none", "max_output_tokens": 12})
    return {
        "call": call.model_dump(),
        "status": whole.status,
        "streamed": [each.arguments for each in final.output],
        "parsed": [each.parsed_arguments for each in final.output],
        "num_deltas": kinds.count(OF_RESPONSES),
        "answered": [answered.output_text, [item.type for item in answered.output]],
    }


def openai_reads(client: OpenAI, model: str) -> dict[str, Any]:
    """Return what the client reads for its caller by pydantic models, and answers to what it then sends back."""
    user: Any = {"role": "user", "content": "hi"}
    asked: dict[str, Any] = {"model": model, **OPTIONS}
    tools: Any = [pydantic_function_tool(GetWeather, name="get_weather")]
    called = client.chat.completions.parse(
        messages=[user], tools=tools, tool_choice="required", parallel_tool_calls=False, **asked
    )
    message = called.choices[0].message
    (call,) = message.tool_calls or []
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    formed = client.chat.completions.parse(messages=[user], response_format=GetWeather, **asked).choices[0].message
    short: dict[str, Any] = {**asked, "max_tokens": 4}
    then: list[Any] = [
        [user, message, result],
        [user, {**formed.model_dump(exclude={"parsed"}), "parsed": {"days": 1}}],
    ]
    answers = [client.chat.completions.create(messages=each, **short).choices[0].message.content for each in then]
    with client.chat.completions.with_streaming_response.create(messages=[user], stream=True, **short) as raw:
        lines = [line for line in raw.iter_lines() if line]
    counted = client.responses.input_tokens.count(model=model, input="hi", instructions="Be brief.")
    chat = [{"role": "system", "content": "Be brief."}, user]
    whole = client.chat.completions.create(messages=chat, **short)
    return {
        "call": call.function.parsed_arguments.days,
        "formed": formed.parsed.days,
        "answers": answers,
        "lines": [line[:6] for line in lines] + lines[-1:],
        "counted": [counted.input_tokens, whole.usage.prompt_tokens],
    }


def langchain_sees(url: str, model: str) -> dict[str, Any]:
    """Return the calls of a model with a bound tool, and a structured output that is asked for by one."""
    chat = ChatOpenAI(base_url=url, api_key="none", model=model, temperature=1, seed=5, max_tokens=120)
    bound = chat.bind_tools([GetWeather], tool_choice="any", parallel_tool_calls=False)
    answer = bound.invoke("hi")
    whole = None
    for chunk in bound.stream("hi"):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    result = ToolMessage("sunny", tool_call_id=answer.tool_calls[0]["id"])
    then = chat.bind_tools([GetWeather], tool_choice="none").invoke([HumanMessage("hi"), answer, result])
    structured = chat.with_structured_output(GetWeather, method="function_calling").invoke("hi")
    return {
        "calls": [[call["name"], call["args"]] for call in answer.tool_calls],
        "streamed": [[call["name"], call["args"]] for call in whole.tool_calls],
        "then": then.content,
        "structured": structured.days,
    }


def main() -> None:
    url, model = sys.argv[1:]
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    seen = {
        "openai": openai_sees(client, model),
        "read": openai_reads(client, model),
        "responses": responses_see(client, model),
    }
    print(json.dumps({**seen, "langchain": langchain_sees(f"{url}/v1", model)}))


if __name__ == "__main__":
    main()
