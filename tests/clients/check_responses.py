"""Print what OpenAI's client sees of /v1/responses: python check_responses.py URL MODEL, in its own environment."""

import asyncio
import json
import sys
from typing import Any

import openai
from openai.types.responses import Response

INPUT = "Write a function that adds two numbers."
OPTIONS: Any = {"temperature": 0, "max_output_tokens": 12, "extra_body": {"ignore_eos": True}}
LOGPROBS: Any = ["message.output_text.logprobs"]


def checked(response: Response) -> dict[str, Any]:
    """Return the object unchanged, after checking that it has all fields that the client's own types want."""
    Response.model_validate_json(response.to_json())
    return {**response.model_dump(), "output_text": response.output_text}


def streamed(events: Any) -> dict[str, Any]:
    seen = [event.model_dump() for event in events]
    return {
        "kinds": [event["type"] for event in seen],
        "numbers": [event["sequence_number"] for event in seen],
        "deltas": [event["delta"] for event in seen if event["type"] == "response.output_text.delta"],
        "done": [event["text"] for event in seen if event["type"] == "response.output_text.done"],
        "items": [event["item"] for event in seen if event["type"].startswith("response.output_item.")],
        "last": seen[-1]["response"],
    }


def sync(url: str, model: str) -> dict[str, Any]:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    responses = client.responses
    turns: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Hello", "annotations": []}],
        },
        {"role": "user", "content": INPUT},
    ]
    first = responses.create(model=model, input=INPUT, metadata={"a": "b"}, user="me", store=True, **OPTIONS)
    stop: Any = {"temperature": 0, "extra_body": {"ignore_eos": True, "stop": [first.output_text[8:10]]}}
    again: Any = [{"role": "user", "content": INPUT}, *(item.model_dump() for item in first.output)]
    seen: dict[str, Any] = {
        "chat": client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": INPUT}],
            temperature=0,
            max_tokens=12,
            logprobs=True,
            top_logprobs=2,
            extra_body={"ignore_eos": True},
        ).model_dump(),
        "turns_chat": client.chat.completions.create(
            model=model,
            messages=[
                {"role": "system", "content": "You are a poet.\n\nBe brief."},
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Hello"},
                {"role": "user", "content": INPUT},
            ],
            temperature=0,
            max_tokens=12,
            extra_body={"ignore_eos": True},
        ).model_dump(),
        "response": checked(first),
        "turns": checked(responses.create(model=model, input=turns, instructions="You are a poet.", **OPTIONS)),
        "again": checked(responses.create(model=model, input=[*again, *turns[3:]], **OPTIONS)),
        "logprobs": checked(responses.create(model=model, input=INPUT, include=LOGPROBS, top_logprobs=2, **OPTIONS)),
        "stopped": checked(responses.create(model=model, input=INPUT, **stop)),
        "plain": checked(
            responses.create(
                model=model,
                input=INPUT,
                text={"format": {"type": "text"}},
                tools=[],
                tool_choice="auto",
                truncation="disabled",
                reasoning=None,
                **OPTIONS,
            )
        ),
        "stream": streamed(responses.create(model=model, input=INPUT, stream=True, **OPTIONS)),
        "logprobs_stream": streamed(
            responses.create(model=model, input=INPUT, stream=True, include=LOGPROBS, top_logprobs=1, **OPTIONS)
        ),
    }
    with responses.stream(model=model, input=INPUT, **stop) as stream:  # the client's own accumulation
        seen["helper"] = ["".join(event.delta for event in stream if event.type == "response.output_text.delta")]
        seen["helper"].append(stream.get_final_response().output_text)
    errors = seen["errors"] = {}
    calls: dict[str, Any] = {
        "model": lambda: responses.create(model="none", input="a"),
        "tools": lambda: responses.create(model=model, input="a", tools=[{"type": "web_search"}]),
        "previous": lambda: responses.create(model=model, input="a", previous_response_id=first.id),
        "long": lambda: responses.create(model=model, input="word " * 5000, stream=True),
        "retrieve": lambda: responses.retrieve(first.id),
        "delete": lambda: responses.delete(first.id),
        "cancel": lambda: responses.cancel(first.id),
        "input_items": lambda: responses.input_items.list(first.id),
    }
    for name, call in calls.items():
        try:
            call()
            errors[name] = "no error"
        except openai.APIStatusError as error:
            errors[name] = [type(error).__name__, error.status_code, error.message, error.param]
    return seen


async def concurrent(url: str, model: str) -> dict[str, Any]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:

        async def one(number: int) -> list[str]:
            stream = await client.responses.create(model=model, input=f"Count to {number}.", stream=True, **OPTIONS)
            return [event.delta async for event in stream if event.type == "response.output_text.delta"]

        streams = await asyncio.gather(*(one(number) for number in range(16)))
        whole = await client.responses.create(model=model, input=INPUT, **OPTIONS)
        left = await client.responses.create(
            model=model, input="a", max_output_tokens=3000, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(left))
        await left.close()
    return {"streams": ["".join(pieces) for pieces in streams], "whole": whole.output_text}


if __name__ == "__main__":
    print(json.dumps({**sync(*sys.argv[1:]), "async": asyncio.run(concurrent(*sys.argv[1:]))}))
