"""Print what LangChain's wrapper of OpenAI's client sees of a server: python check_langchain.py URL MODEL."""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

import openai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI
from pieces import in_pieces

SCHEMA: dict[str, Any] = {
    "title": "Verdict",
    "description": "A verdict.",
    "type": "object",
    "properties": {"verdict": {"enum": ["yes", "no"]}},
    "required": ["verdict"],
}


def multiply(first: int, second: int) -> int:
    """Multiply two numbers."""
    return first * second


def fault(call: Callable[[], Any]) -> str:
    """Return the message of the error that the server answers with."""
    try:
        call()
    except openai.BadRequestError as error:
        return str(error)
    return "no error"


def begun(call: Callable[[], Any]) -> str:
    """Return an answer's text, also where the client raises because it was cut off."""
    try:
        return str(call().content)
    except openai.LengthFinishReasonError as error:
        return str(error.completion.choices[0].message.content)


def main(url: str, model: str) -> dict[str, Any]:
    options: Any = {"base_url": f"{url}/v1", "api_key": "none", "model": model, "temperature": 0, "max_retries": 0}
    chat = ChatOpenAI(**options, max_tokens=12, extra_body={"ignore_eos": True})
    conversation = [SystemMessage("Answer briefly."), HumanMessage("Hi"), AIMessage("Hello."), HumanMessage("Why?")]
    whole = chat.invoke(conversation)
    pieces = in_pieces(lambda: list(chat.stream(conversation)), len)
    plain = OpenAI(**options, max_tokens=8)

    async def batch() -> tuple[list[str], str]:
        answers = await chat.abatch([[HumanMessage(f"Say {n}.")] for n in range(8)])
        streamed = [str(piece.content) async for piece in chat.astream(conversation)]
        return [str(answer.content) for answer in answers], "".join(streamed)

    answers, streamed = asyncio.run(batch())

    return {
        "whole": whole.content,
        "usage": whole.usage_metadata,
        "model": whole.response_metadata["model_name"],
        "reason": whole.response_metadata["finish_reason"],
        "stream": "".join(str(piece.content) for piece in pieces),
        "num_pieces": len(pieces),
        "stream_usage": [
            piece.usage_metadata for piece in chat.stream(conversation, stream_usage=True) if piece.usage_metadata
        ],
        "async_stream": streamed,
        "errors": {
            "tools": fault(lambda: chat.bind_tools([multiply]).invoke("2 * 3?")),
            "function_calling": fault(
                lambda: chat.with_structured_output(SCHEMA, method="function_calling").invoke("Who?")
            ),
        },
        "structured": ChatOpenAI(**options, max_tokens=200).with_structured_output(SCHEMA).invoke("Is it?"),
        "json_mode": begun(
            lambda: ChatOpenAI(
                **options, max_tokens=20, model_kwargs={"response_format": {"type": "json_object"}}
            ).invoke("JSON")
        ),
        "batch": answers,
        "plain": plain.invoke("def add("),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
