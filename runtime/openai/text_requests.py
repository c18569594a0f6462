"""The bodies that ask for no new tokens, as checked requests: /v1/embeddings, /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from inferc.errors import RequestError, shown
from inferc.runtime.openai import fields as openai_fields
from inferc.runtime.openai.fields import check_fields
from inferc.runtime.openai.messages import messages_of
from inferc.runtime.openai.request import (
    OF_REASONING,
    OF_TOOLS,
    SERVED,
    check_is_no_chat,
    check_supported,
    not_built,
    prompts_of,
    template_of,
)
from inferc.runtime.step.sampling_params import check_integer
from inferc.runtime.tools.tools import tools_of

MAX_DIMENSIONS = 2**31 - 1
# Unsupported fields of embeddings, with the values that are accepted because they ask for nothing unsupported.
FIXED_OF_EMBEDDINGS: dict[str, tuple[Any, ...]] = {
    "truncate_prompt_tokens": (None,),
    "add_special_tokens": (None, True),
    "embed_dtype": (None, "float32"),
    "normalize": (None,),
}


@dataclass(frozen=True)
class EmbeddingRequest:
    """A checked request for the vectors of texts, which may be given as token ids.

    dimensions: the length to which the vectors are cut; None: they stay as they are.
    """

    model: str
    inputs: Sequence[str | list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


def read_embedding(body: Mapping[str, Any]) -> EmbeddingRequest:
    """Convert a body into a request and check all of it. Raises RequestError naming the faulty field."""
    check_fields(body, openai_fields.EMBEDDING)
    for name, allowed in FIXED_OF_EMBEDDINGS.items():
        if body.get(name) not in allowed:
            raise not_built(name, body[name])
    inputs = prompts_of(body["input"], "input")
    form = body.get("encoding_format") or "float"
    if form not in ("float", "base64"):
        raise RequestError(f"encoding_format is {shown(form, 40)}; expected float or base64")
    dimensions = body.get("dimensions")
    if dimensions is not None:
        check_dimensions(dimensions)
    return EmbeddingRequest(body.get("model") or "", inputs, cast(Literal["float", "base64"], form), dimensions)


def check_dimensions(value: int) -> None:
    """Raise RequestError for a length that no vector has; whether the model's have it, only the model knows."""
    check_integer("dimensions", value, 1, MAX_DIMENSIONS)


@dataclass(frozen=True)
class TokenizeRequest:
    """A checked request for the token ids of a text or of a conversation.

    template: variables of the chat template. has_tools: tools are among them.
    """

    model: str
    prompt: str | list[dict[str, Any]]
    add_special_tokens: bool = True
    template: Mapping[str, Any] = field(default_factory=dict)
    return_token_strs: bool = False
    has_tools: bool = False


def read_tokenize(body: Mapping[str, Any]) -> TokenizeRequest:
    """Convert a body into a request and check all of it. Raises RequestError naming the faulty field.

    A conversation is read as that of a chat; fields of sampling have no meaning here and are ignored.
    """
    check_fields(body, openai_fields.TOKENIZE)
    model, text, is_spelled = body.get("model") or "", body.get("prompt"), bool(body.get("return_token_strs"))
    if (text is None) == (body.get("messages") is None):
        raise RequestError("prompt: expected one of prompt and messages")
    if text is not None:
        check_is_no_chat(body)
        special = body.get("add_special_tokens") is not False
        return TokenizeRequest(model, text, special, return_token_strs=is_spelled)
    check_supported(body, {*SERVED, *OF_TOOLS, *OF_REASONING})
    messages, template, tools = messages_of(body, has_calls=True), template_of(body), tools_of(body)
    if tools is not None:
        template["tools"] = tools.for_template
    return TokenizeRequest(
        model, messages, template=template, return_token_strs=is_spelled, has_tools=tools is not None
    )


@dataclass(frozen=True)
class DetokenizeRequest:
    """A checked request for the text of token ids."""

    model: str
    tokens: Sequence[int]
    skip_special_tokens: bool = False


def read_detokenize(body: Mapping[str, Any]) -> DetokenizeRequest:
    """Convert a body into a request and check all of it. Raises RequestError naming the faulty field."""
    check_fields(body, openai_fields.DETOKENIZE)
    return DetokenizeRequest(body.get("model") or "", body["tokens"], bool(body.get("skip_special_tokens")))
