"""Print what LiteLLM sees of a server whose model calls tools, by each API: python check_litellm_tools.py URL MODEL."""

import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it asks for a list of prices otherwise

import litellm

MESSAGES: Any = [{"role": "user", "content": "hi"}]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Paris"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "description": "It.", "parameters": WEATHER}}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


def calls(message: Any) -> list[list[str]]:
    return [[call.function.name, call.function.arguments] for call in message.tool_calls or []]


def by_completion(model: str, base: str, **more: Any) -> dict[str, Any]:
    """Return calls, whole and streamed, and the end of a conversation in which one was answered."""
    options: Any = {"model": model, "api_base": base, "api_key": "none", "max_retries": 0, "temperature": 1, **more}
    options.update(tools=[TOOL], tool_choice=NAMED, parallel_tool_calls=False, max_tokens=120)
    whole = litellm.completion(messages=MESSAGES, **options).choices[0]
    chunks = list(litellm.completion(messages=MESSAGES, stream=True, **options))
    joined = litellm.stream_chunk_builder(chunks, messages=MESSAGES).choices[0]
    result = {"role": "tool", "tool_call_id": whole.message.tool_calls[0].id, "content": "sunny"}
    then = [*MESSAGES, whole.message.model_dump(exclude_none=True), result]
    answered = litellm.completion(messages=then, **{**options, "tool_choice": "none", "max_tokens": 12}).choices[0]
    return {
        "reasons": [whole.finish_reason, joined.finish_reason],
        "calls": calls(whole.message),
        "streamed": calls(joined.message),
        "answered": answered.message.content,
    }


def main(url: str, model: str) -> dict[str, Any]:
    litellm.suppress_debug_info = True
    response = litellm.responses(
        model=f"openai/{model}",
        api_base=f"{url}/v1",
        api_key="none",
        input="hi",
        tools=[{"type": "function", **TOOL["function"]}],
        tool_choice={"type": "function", "name": "get_weather"},
        parallel_tool_calls=False,
        temperature=1,
        max_output_tokens=120,
        extra_body={"seed": 5},
    )
    return {
        "openai": by_completion(f"openai/{model}", f"{url}/v1", seed=5),
        "anthropic": by_completion(f"anthropic/{model}", url, seed=5, allowed_openai_params=["seed"]),
        "responses": [[item.name, item.arguments] for item in response.output],
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
