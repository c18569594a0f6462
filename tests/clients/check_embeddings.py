"""Vectors as OpenAI's client and LangChain's wrapper get them: python check_embeddings.py URL MODEL."""

import json
import sys
from typing import Any

import openai
from langchain_openai import OpenAIEmbeddings


def main(url: str, model: str) -> dict[str, Any]:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    texts = ["a text", "another one"]
    default = client.embeddings.create(model=model, input=texts)
    floats = client.embeddings.create(model=model, input=texts, encoding_format="float")
    wrapper = OpenAIEmbeddings(
        base_url=f"{url}/v1", api_key="none", model=model, check_embedding_ctx_length=False, max_retries=0
    )
    return {
        "default": [entry.embedding for entry in default.data],
        "floats": [entry.embedding for entry in floats.data],
        "tokens": default.usage.prompt_tokens,
        "cut": client.embeddings.create(model=model, input="a text", dimensions=8).data[0].embedding,
        "ids": client.embeddings.create(model=model, input=[[5, 6, 7], [8]]).data[1].embedding,
        "langchain": wrapper.embed_documents(texts),
        "query": wrapper.embed_query("a text"),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
