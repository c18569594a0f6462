"""Print what OpenAI's client sees of responses with reasoning: python check_reasoning_items.py URL MODEL TOKEN."""

import json
import sys
from typing import Any

from openai import OpenAI
from openai.types.responses import Response

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def sees(client: OpenAI, model: str, begins: str) -> dict[str, Any]:
    """Return a response, whole and streamed, and a turn after it; begins: the token that begins reasoning."""
    asked: dict[str, Any] = {
        "model": model,
        "input": "hi",
        "temperature": 1,
        "max_output_tokens": 120,
        "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}},
        "extra_body": {"seed": 5, "logit_bias": {begins: 100}, "max_reasoning_tokens": 6},
    }
    whole: Any = client.responses.create(**asked)
    Response.model_validate_json(whole.to_json())
    streamed = ["", ""]
    with client.responses.stream(**asked) as stream:
        for event in stream:
            if event.type == "response.reasoning_text.delta":
                streamed[0] += event.delta
            elif event.type == "response.output_text.delta":
                streamed[1] += event.delta
    turns: Any = [{"role": "user", "content": "hi"}, *whole.output, {"role": "user", "content": "hi"}]
    again = client.responses.create(model=model, input=turns, max_output_tokens=9, reasoning={"effort": "none"})
    return {
        "kinds": [item.type for item in whole.output],
        "reasoning": whole.output[0].content[0].text,
        "text": whole.output_text,
        "reasoning_tokens": whole.usage.output_tokens_details.reasoning_tokens,
        "streamed": streamed,
        "again": again.output_text,
    }


if __name__ == "__main__":
    url, model, begins = sys.argv[1:]
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        print(json.dumps(sees(client, model, begins)))
