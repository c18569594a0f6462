"""Print what Anthropic's client sees of a server: python check_messages.py URL MODEL TOOLED_URL TOOLED_MODEL."""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any, Literal

import anthropic
from pieces import in_pieces
from pydantic import BaseModel

MESSAGES: Any = [{"role": "user", "content": "Write a function that adds two numbers."}]
HI: Any = [{"role": "user", "content": "hi"}]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Paris"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: Any = {"name": "get_weather", "description": "The weather.", "input_schema": WEATHER, "strict": True}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
SAMPLED: dict[str, Any] = {"temperature": 1, "seed": 5}


class Verdict(BaseModel):
    """The answer that the model is asked for."""

    verdict: Literal["yes", "no"]


def fault(call: Callable[[], Any]) -> list[Any]:
    """Return the kind, the status, the type and the message of the error that a call raises."""
    try:
        call()
    except anthropic.APIStatusError as error:
        return [type(error).__name__, error.status_code, error.type, str(error)]
    return ["no error"]


def plain(client: anthropic.Anthropic, model: str) -> dict[str, Any]:
    options: Any = {"model": model, "max_tokens": 12, "messages": MESSAGES, "extra_body": GREEDY}
    whole = client.messages.create(**options)
    text = whole.content[0].text
    with client.messages.stream(**options) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    stopped = client.messages.create(**options, stop_sequences=[text[4:6]])
    turns: Any = [*MESSAGES, whole.to_param(), {"role": "user", "content": [{"type": "text", "text": "Why?"}]}]
    limit = client.messages.create(**{**options, "messages": turns}, system=[{"type": "text", "text": "Be brief."}])
    parsed = client.messages.parse(
        model=model, max_tokens=200, messages=MESSAGES, output_format=Verdict, extra_body=SAMPLED
    )
    return {
        "whole": whole.model_dump(),
        "request_id": whole._request_id,
        "pieces": pieces,
        "final": final.model_dump(),
        "stopped": [stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence],
        "turns": limit.model_dump(),
        "count": client.messages.count_tokens(model=model, messages=MESSAGES).input_tokens,
        "models": [each.id for each in client.models.list()],
        "model": client.models.retrieve(model).model_dump(mode="json"),
        "parsed": [parsed.parsed_output.verdict if parsed.parsed_output else None, parsed.stop_reason],
        "errors": {
            "model": fault(lambda: client.messages.create(**{**options, "model": "other"})),
            "long": fault(lambda: client.messages.create(**{**options, "messages": [{**HI[0], "content": "a" * 900}]})),
            "tools": fault(lambda: client.messages.create(**options, tools=[TOOL])),
            "retrieve": fault(lambda: client.models.retrieve("other")),
            "count": fault(lambda: client.messages.count_tokens(model=model, messages=[])),
            "stream": fault(lambda: client.messages.stream(**{**options, "max_tokens": -1}).__enter__()),
        },
    }


def tooled(client: anthropic.Anthropic, model: str) -> dict[str, Any]:
    """Return calls, whole and streamed, and the end of a conversation in which one was answered."""
    choice: Any = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    options: Any = {"model": model, "max_tokens": 120, "messages": HI, "tools": [TOOL], "extra_body": SAMPLED}
    whole = client.messages.create(**options, tool_choice=choice)

    def streamed() -> tuple[list[str], Any]:
        with client.messages.stream(**options, tool_choice=choice) as stream:
            return [event.type for event in stream], stream.get_final_message()

    kinds, final = in_pieces(streamed, lambda found: found[0].count("input_json"), 2)
    (call,) = whole.content
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    then: Any = [*HI, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    answered = client.messages.create(**{**options, "messages": then, "max_tokens": 12}, tool_choice={"type": "none"})
    count: Any = {"model": model, "messages": then, "tools": [TOOL]}
    return {
        "whole": whole.model_dump(),
        "final": final.model_dump(),
        "num_deltas": kinds.count("input_json"),
        "answered": answered.model_dump(),
        "count": client.messages.count_tokens(**count).input_tokens,
    }


async def many(url: str, model: str) -> list[str]:
    """Return the texts of answers that come at the same time."""
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:

        async def one() -> str:
            async with client.messages.stream(
                model=model, max_tokens=12, messages=MESSAGES, extra_body=GREEDY
            ) as stream:
                return str(await stream.get_final_text())

        return await asyncio.gather(*(one() for _ in range(16)))


def main(url: str, model: str, tooled_url: str, tooled_model: str) -> dict[str, Any]:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    other = anthropic.Anthropic(base_url=tooled_url, auth_token="none", api_key=None, max_retries=0)
    return {
        "plain": plain(client, model),
        "tooled": tooled(other, tooled_model),
        "many": asyncio.run(many(url, model)),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
