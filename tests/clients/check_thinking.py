"""Print what Anthropic's client sees of a server whose model reasons: python check_thinking.py URL MODEL TOKEN."""

import json
import sys
from typing import Any

import anthropic

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
HI: Any = {"role": "user", "content": "hi"}


def sees(client: anthropic.Anthropic, model: str, begins: str) -> dict[str, Any]:
    """Return an answer with thoughts, whole and streamed, and a turn after it; begins: the token that begins them."""
    options: Any = {
        "model": model,
        "messages": [HI],
        "max_tokens": 120,
        "thinking": {"type": "enabled", "budget_tokens": 6},
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        "extra_body": {"temperature": 1, "seed": 5, "logit_bias": {begins: 100}},
    }
    whole = client.messages.create(**options)
    streamed = ["", "", ""]
    with client.messages.stream(**options) as stream:
        for event in stream:
            if event.type == "thinking":
                streamed[0] += event.thinking
            elif event.type == "text":
                streamed[1] += event.text
            elif event.type == "signature":
                streamed[2] = event.signature
        final = stream.get_final_message()
    turns: Any = [HI, {"role": "assistant", "content": whole.content}, HI]
    then = client.messages.create(model=model, max_tokens=9, messages=turns, thinking={"type": "disabled"})
    return {
        "content": [block.model_dump(exclude_none=True) for block in whole.content],
        "usage": whole.usage.model_dump(exclude_none=True),
        "streamed": streamed,
        "final": [block.model_dump(exclude_none=True) for block in final.content],
        "then": then.content[0].type,
    }


if __name__ == "__main__":
    url, model, begins = sys.argv[1:]
    print(json.dumps(sees(anthropic.Anthropic(base_url=url, api_key="none", max_retries=0), model, begins)))
