"""The next turns of a conversation whose first ones have their tokens already, as they were generated.

A chat template writes whole conversations. Rendered and tokenized again, an answer may get other tokens than it was
generated with, and the prefix cache would not find them. Therefore only the text behind the known messages is
tokenized. A mark stands in the messages for each answer, so that what the template does with answers (to trim them, to
leave out reasoning) changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inferc.errors import RequestError
from inferc.runtime.text.tokenizer import Text

REWRITES = (
    "the model's chat template does not write a longer conversation by adding to a shorter one; give the conversation"
    " as a whole, or append plain text"
)


@dataclass(frozen=True)
class Known:
    """The part of a conversation whose tokens are known: its first messages.

    mark: what stands in messages for what was generated; a text is known up to the end of its last mark.
    """

    num_messages: int = 0
    mark: str = ""


NOTHING = Known()


def render_behind(
    text: Text,
    messages: Sequence[dict[str, Any]],
    known: Known,
    /,
    add_generation_prompt: bool = True,
    **options: Any,
) -> str:
    """Return the text that the chat template writes for a conversation, behind that of its known messages.

    options: as in `Text.render_chat`. Raises RequestError as that does, for more known messages than there are, and for
    a template that changes what it wrote for the known messages.
    """
    if not 0 <= known.num_messages <= len(messages):
        raise RequestError(f"num_known is {known.num_messages}; expected 0 to {len(messages)}, the number of messages")
    whole = _behind_mark(text.render_chat(messages, add_generation_prompt=add_generation_prompt, **options), known.mark)
    if not known.num_messages or _num_marks(messages, known) > _num_marks(messages[: known.num_messages], known):
        return whole
    before = text.render_chat(messages[: known.num_messages], add_generation_prompt=False, **options)
    before = _behind_mark(before, known.mark)
    if not whole.startswith(before):
        raise RequestError(REWRITES)
    return whole[len(before) :]


def _behind_mark(text: str, mark: str) -> str:
    return text.rpartition(mark)[2] if mark else text


def _num_marks(messages: Sequence[Mapping[str, Any]], known: Known) -> int:
    return sum(bool(known.mark) and known.mark in (message.get("content") or "") for message in messages)
