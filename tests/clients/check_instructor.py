"""Print what Instructor makes of a server's calls of tools, by each API: python check_instructor.py URL MODEL."""

import json
import sys
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import anthropic
import instructor
import openai
from instructor.core.exceptions import IncompleteOutputException
from pieces import in_pieces
from pydantic import BaseModel

MESSAGES: Any = [{"role": "user", "content": "hi"}]
Result = TypeVar("Result")


class Weather(BaseModel):
    """The weather that is asked for."""

    city: Literal["Rome", "Paris"]
    is_warm: bool


def first_that_ended(ask: Callable[[int], Result]) -> Result:
    """Return the first answer that came to its end; a model of random weights may go on for long."""
    for seed in range(20):
        try:
            return ask(seed)
        except IncompleteOutputException:
            continue
    raise AssertionError("none of the answers ended")


def main(url: str, model: str) -> dict[str, Any]:
    plain = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    theirs = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    tools = instructor.from_openai(plain, mode=instructor.Mode.TOOLS).chat.completions
    responses = instructor.from_openai(plain, mode=instructor.Mode.RESPONSES_TOOLS).responses
    messages = instructor.from_anthropic(theirs, mode=instructor.Mode.TOOLS).messages
    schema = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA).chat.completions
    asked: Any = {"model": model, "messages": MESSAGES, "temperature": 1, "max_tokens": 120, "max_retries": 0}
    one: Any = {**asked, "response_model": Weather, "parallel_tool_calls": False, "seed": 5}
    again: Any = {"model": model, "response_model": Weather, "max_retries": 0}
    partials = in_pieces(lambda: list(tools.create_partial(**one)), len, 2)
    return {
        "whole": tools.create(**one).model_dump(),
        "partial": partials[-1].model_dump(),
        "num_partials": len(partials),
        "response": first_that_ended(
            lambda seed: responses.create(
                **again, input="hi", temperature=1, max_output_tokens=120, extra_body={"seed": seed}
            )
        ).model_dump(),
        "message": first_that_ended(
            lambda seed: messages.create(**again, messages=MESSAGES, max_tokens=120, extra_body={"seed": seed})
        ).model_dump(),
        "formed": first_that_ended(
            lambda seed: schema.create(**{**asked, "max_tokens": 200}, response_model=Weather, seed=seed)
        ).model_dump(),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
