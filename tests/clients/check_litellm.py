"""Print what LiteLLM sees of a server: python check_litellm.py URL MODEL [embeddings], in its own environment."""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it asks for a list of prices otherwise

import litellm
import openai
from pieces import in_pieces

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hi."}]
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
VERDICT: Any = {"type": "object", "properties": {"verdict": {"enum": ["yes", "no"]}}, "required": ["verdict"]}
SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": VERDICT}}


def fault(call: Callable[[], Any]) -> list[Any]:
    """Return the kind, the status and the message of the error that a call raises."""
    try:
        call()
    except openai.APIStatusError as error:  # LiteLLM's own errors are of these kinds
        return [type(error).__name__, error.status_code, str(error)]
    return ["no error"]


def main(url: str, model: str) -> dict[str, Any]:
    litellm.suppress_debug_info = True
    place: Any = {"api_base": f"{url}/v1", "api_key": "none", "max_retries": 0}
    options: Any = {"model": f"openai/{model}", "temperature": 0, "max_tokens": 12, "ignore_eos": True, **place}
    whole = litellm.completion(messages=MESSAGES, **options)
    usage = {"include_usage": True}
    chunks = in_pieces(
        lambda: list(litellm.completion(messages=MESSAGES, stream=True, stream_options=usage, **options)),
        lambda found: sum(bool(chunk.choices) for chunk in found),
    )
    many = litellm.completion(messages=MESSAGES, n=2, seed=3, logprobs=True, top_logprobs=2, stop=["zq"], **options)

    async def together() -> list[str]:
        answers = await asyncio.gather(*(litellm.acompletion(messages=MESSAGES, **options) for _ in range(8)))
        return [answer.choices[0].message.content for answer in answers]

    return {
        "whole": whole.choices[0].message.content,
        "reason": whole.choices[0].finish_reason,
        "usage": whole.usage.model_dump(),
        "stream": [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices],
        "stream_usage": [chunk.usage.model_dump() for chunk in chunks if getattr(chunk, "usage", None)],
        "many": [choice.message.content for choice in many.choices],
        "logprobs": len(many.choices[0].logprobs.content),
        "together": asyncio.run(together()),
        "vllm": litellm.completion(messages=MESSAGES, **{**options, "model": f"hosted_vllm/{model}"})
        .choices[0]
        .message.content,
        "text": litellm.text_completion(prompt="def add(", **{**options, "model": f"text-completion-openai/{model}"})
        .choices[0]
        .text,
        "structured": litellm.completion(
            messages=MESSAGES, response_format=SCHEMA, **{**options, "ignore_eos": False, "max_tokens": 200}
        )
        .choices[0]
        .message.content,
        "errors": {
            "tools": fault(lambda: litellm.completion(messages=MESSAGES, tools=[TOOL], **options)),
            "schema": fault(lambda: litellm.completion(messages=MESSAGES, response_format=SCHEMA, **options)),
            "model": fault(lambda: litellm.completion(messages=MESSAGES, **{**options, "model": "openai/none"})),
            "long": fault(lambda: litellm.completion(messages=[{"role": "user", "content": "a " * 9999}], **options)),
            "embedding": fault(lambda: litellm.embedding(model=f"openai/{model}", input=["a"], **place)),
        },
    }


def embeddings(url: str, model: str) -> dict[str, Any]:
    place: Any = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none"}
    texts = ["a text", "another one"]
    found = litellm.embedding(input=texts, **place)
    floats = litellm.embedding(input=texts, encoding_format="float", **place)
    return {
        "default": [each["embedding"] for each in found.data],
        "floats": [each["embedding"] for each in floats.data],
        "tokens": found.usage.prompt_tokens,
    }


if __name__ == "__main__":
    print(json.dumps(embeddings(*sys.argv[1:3]) if sys.argv[3:] else main(*sys.argv[1:])))
