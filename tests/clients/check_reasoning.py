"""Print what OpenAI's client sees of a server whose model reasons: python check_reasoning.py URL MODEL TOKEN."""

import json
import sys
from typing import Any

from openai import OpenAI

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def sees(client: OpenAI, model: str, begins: str) -> dict[str, Any]:
    """Return an answer of a form, whole and streamed; begins: the token by which the model begins to reason."""
    asked: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 1,
        "seed": 5,
        "max_tokens": 120,
        "logit_bias": {begins: 100},
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}},
        "extra_body": {"max_reasoning_tokens": 6},
    }
    whole = client.chat.completions.create(**asked)
    message: Any = whole.choices[0].message
    usage: Any = whole.usage
    streamed = ["", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        delta: Any = chunk.choices[0].delta
        streamed[0] += getattr(delta, "reasoning_content", None) or ""
        streamed[1] += delta.content or ""
    return {
        "reasoning": message.reasoning_content,
        "content": message.content,
        "city": json.loads(message.content)["city"],
        "reasoning_tokens": usage.completion_tokens_details.reasoning_tokens,
        "streamed": streamed,
    }


if __name__ == "__main__":
    url, model, begins = sys.argv[1:]
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        print(json.dumps(sees(client, model, begins)))
