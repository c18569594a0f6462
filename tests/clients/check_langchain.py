"""Print what LangChain's wrapper of OpenAI's client sees of a server: python check_langchain.py URL MODEL."""

import asyncio
import json
import sys
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI


def main(url: str, model: str) -> dict[str, Any]:
    options: Any = {"base_url": f"{url}/v1", "api_key": "none", "model": model, "temperature": 0, "max_retries": 0}
    chat = ChatOpenAI(**options, max_tokens=12, extra_body={"ignore_eos": True})
    conversation = [SystemMessage("Answer briefly."), HumanMessage("Hi"), AIMessage("Hello."), HumanMessage("Why?")]
    whole = chat.invoke(conversation)
    pieces = list(chat.stream(conversation))
    plain = OpenAI(**options, max_tokens=8)

    async def batch() -> list[str]:
        return [str(answer.content) for answer in await chat.abatch([[HumanMessage(f"Say {n}.")] for n in range(8)])]

    return {
        "whole": whole.content,
        "usage": whole.usage_metadata,
        "model": whole.response_metadata["model_name"],
        "reason": whole.response_metadata["finish_reason"],
        "stream": "".join(str(piece.content) for piece in pieces),
        "num_pieces": len(pieces),
        "batch": asyncio.run(batch()),
        "plain": plain.invoke("def add("),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
