"""The calls that only tokenize or detokenize, for the HTTP and the gRPC interface.

Each one counts as a request of the caller's API key, and is bounded in size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from inferc.errors import RequestError
from inferc.runtime.text.turns import NOTHING, Known
from inferc.serve.models.long_texts import BY_TURNS, check_characters
from inferc.serve.models.served_model import ServedModel
from inferc.serve.security.access import CALLER

MAX_TOKENS = 1 << 20

Result = TypeVar("Result")


async def tokenize(model: ServedModel, text: str, add_special_tokens: bool = True) -> list[int]:
    """Return the token ids of a text.

    Raises RequestError for a text that is too long, and the same errors as Caller.begin_reading.
    """
    check_characters(len(text), model.engine.facts.max_model_len)
    with _counted():
        return await model.encode(text, add_special_tokens, is_prompt=False)


async def tokenize_chat(
    model: ServedModel,
    messages: Sequence[dict[str, Any]],
    variables: Mapping[str, Any] | None = None,
    known: Known = NOTHING,
) -> list[int]:
    """Return the token ids of a conversation behind what is known, rendered by the chat template with `variables`.

    Raises the same errors as `tokenize`.
    """
    with _counted():
        return await model.encode_chat(messages, variables, is_prompt=False, known=known)


async def detokenize(model: ServedModel, token_ids: Sequence[int], made: Callable[[], Result]) -> Result:
    """Return the result of `made`, which turns the ids into text, on a thread, as there may be many ids.

    Raises RequestError for too many ids, and the same errors as Caller.begin_reading.
    """
    limit = max(MAX_TOKENS, model.engine.facts.max_model_len)
    if len(token_ids) > limit:
        raise RequestError(f"tokens: found {len(token_ids)}; at most {limit} are turned into text at once, send parts")
    with _counted():
        return await BY_TURNS.run(made)


@contextmanager
def _counted() -> Iterator[None]:
    """Count the body as a request of the caller's with no tokens, since the model computes none."""
    caller = CALLER.get()
    caller.begin_reading(0)
    try:
        yield
    finally:
        caller.end(0)
