"""Print what OpenAI's client sees of a server: python check_openai.py URL MODEL, in an environment of its own."""

import asyncio
import json
import sys
from typing import Any, Literal

import openai
import pydantic

MESSAGES: Any = [{"role": "user", "content": "Write a function that adds two numbers."}]
OPTIONS: Any = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}


class Verdict(pydantic.BaseModel):
    """The answer that the model is asked for."""

    verdict: Literal["yes", "no"]
    count: int = pydantic.Field(ge=0, le=9)


def parsed(client: openai.OpenAI, model: str) -> dict[str, Any]:
    """Answers of a form: by the client's own helpers, and by vLLM's fields."""
    options: Any = {"model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": 200}
    whole = client.chat.completions.parse(response_format=Verdict, **options)
    with client.chat.completions.stream(response_format=Verdict, **options) as stream:
        last = stream.get_final_completion()
    response = client.responses.parse(
        model=model, input="How many?", text_format=Verdict, temperature=0, max_output_tokens=200
    )
    plain = client.completions.create(
        model=model, prompt="a", temperature=0, extra_body={"guided_regex": "[a-c]{3}"}, max_tokens=9
    )
    choice = client.chat.completions.create(
        **{**options, "temperature": 1}, extra_body={"structured_outputs": {"choice": ["left", "right"]}}, seed=1
    )
    return {
        "whole": whole.choices[0].message.parsed.model_dump(),
        "stream": last.choices[0].message.parsed.model_dump(),
        "response": response.output_parsed.model_dump(),
        "regex": plain.choices[0].text,
        "choice": choice.choices[0].message.content,
        "reasons": [each.choices[0].finish_reason for each in (whole, last, plain, choice)],
    }


def streamed(chunks: Any) -> dict[str, Any]:
    """A stream's pieces, put together."""
    pieces, reasons, usage, roles, shapes = [], [], None, [], []
    for chunk in chunks:
        shapes.append(len(chunk.choices))
        for choice in chunk.choices:
            delta = getattr(choice, "delta", None)
            pieces.append((choice.text if delta is None else delta.content) or "")
            roles += [delta.role] if delta is not None and delta.role else []
            reasons += [choice.finish_reason] if choice.finish_reason else []
        usage = chunk.usage or usage
    return {
        "pieces": pieces,
        "reasons": reasons,
        "roles": roles,
        "shapes": shapes,
        "usage": usage and usage.model_dump(),
    }


def sync(url: str, model: str) -> dict[str, Any]:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    usage = {"include_usage": True}
    seen: dict[str, Any] = {
        "models": [entry.id for entry in client.models.list()],
        "model": client.models.retrieve(model).id,
        "completion": client.completions.create(model=model, prompt="def add(", **OPTIONS).model_dump(),
        "chat": client.chat.completions.create(model=model, messages=MESSAGES, **OPTIONS).model_dump(),
        "stream": streamed(
            client.completions.create(model=model, prompt="def add(", stream=True, stream_options=usage, **OPTIONS)
        ),
        "chat_stream": streamed(
            client.chat.completions.create(model=model, messages=MESSAGES, stream=True, stream_options=usage, **OPTIONS)
        ),
        "plain_stream": streamed(client.completions.create(model=model, prompt="def add(", stream=True, **OPTIONS)),
        "two": client.completions.create(
            model=model, prompt=["def add(", [5, 6, 7]], n=2, seed=3, max_tokens=4
        ).model_dump(),
        "two_stream": streamed(
            client.completions.create(model=model, prompt=["a", "b"], n=2, max_tokens=4, stream=True)
        ),
        "logprobs": client.completions.create(
            model=model, prompt="def add(", logprobs=2, echo=True, **OPTIONS
        ).model_dump(),
        "chat_logprobs": client.chat.completions.create(
            model=model, messages=MESSAGES, logprobs=True, top_logprobs=2, **OPTIONS
        ).model_dump(),
        "scored": client.completions.create(
            model=model, prompt="def add(", max_tokens=0, echo=True, logprobs=1
        ).model_dump(),
        "stopped": client.completions.create(
            model=model, prompt="def add(", stop=["("], max_tokens=64, temperature=0
        ).model_dump(),
    }
    raw = client.completions.with_raw_response.create(
        model=model, prompt="a", max_tokens=1, extra_headers={"X-Request-Id": "my-own-id"}
    )
    seen["request_id"] = raw.headers["x-request-id"]
    seen["parsed"] = parsed(client, model)
    errors = seen["errors"] = {}
    calls: dict[str, Any] = {
        "model": lambda: client.completions.create(model="none", prompt="a"),
        "max_tokens": lambda: client.completions.create(model=model, prompt="a", max_tokens=-1),
        "long": lambda: client.completions.create(model=model, prompt=[5] * 9999, max_tokens=1, stream=True),
        "tools": lambda: client.chat.completions.create(
            model=model, messages=MESSAGES, tools=[{"type": "function", "function": {"name": "f"}}]
        ),
        "schema": lambda: client.chat.completions.create(
            model=model,
            messages=MESSAGES,
            response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"contains": {"const": 1}}}},
            stream=True,
        ),
        "image": lambda: client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
        ),
        "embeddings": lambda: client.embeddings.create(model=model, input="a"),
        "retrieve": lambda: client.models.retrieve("none"),
    }
    for name, call in calls.items():
        try:
            call()
            errors[name] = "no error"
        except openai.APIStatusError as error:
            errors[name] = [type(error).__name__, error.status_code, error.message, error.param, error.code]
    return seen


async def concurrent(url: str, model: str) -> dict[str, Any]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:

        async def one(number: int) -> list[str]:
            stream = await client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": f"Count to {number}."}], stream=True, **OPTIONS
            )
            return [chunk.choices[0].delta.content or "" async for chunk in stream]

        streams = await asyncio.gather(*(one(number) for number in range(32)))
        whole = await client.chat.completions.create(model=model, messages=MESSAGES, **OPTIONS)
        left = await client.completions.create(
            model=model, prompt="a", max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(left))
        await left.close()
    return {"streams": ["".join(pieces) for pieces in streams], "whole": whole.choices[0].message.content}


if __name__ == "__main__":
    print(json.dumps({**sync(*sys.argv[1:]), "async": asyncio.run(concurrent(*sys.argv[1:]))}))
