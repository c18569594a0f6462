"""The chat template of a checkpoint for the artifact, and what transformers makes of conversations by it."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(__name__)

# Conversations that templates treat differently: who begins, whether an answer is to follow, spaces at ends.
GOLDEN_CHATS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Hello, world!"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " two\nlines "}],
    [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "Café? 👩‍👩‍👧 <|im_"},
    ],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
)


def chat_template(tokenizer: Any) -> str | None:
    """The chat template; of several named ones the default."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        if "default" not in template:
            log.warning("chat templates %s have no default: left out", ", ".join(template))
        template = template.get("default")
    return None if template is None else str(template)


def golden_chat(tokenizer: Any, template: str, stop_ids: list[int], name: str) -> dict[str, Any]:
    """What transformers makes of GOLDEN_CHATS by the template, for the runtime to be compared with.

    vectors: [{messages, add_generation_prompt, text, token_ids}], without conversations that the template refuses.
    depends_on_time: texts hold the day they were made on. begins_with_bos: of a plain text, and of a conversation; the
    latter has it from the template, never twice. stop_token_ids: that end a text. turn_end: the first special token
    that the template writes behind an answer; a warning says so if it ends no text.
    """
    vectors: list[dict[str, Any]] = []
    for messages in GOLDEN_CHATS:
        goes_on = messages[-1]["role"] == "user"
        try:
            text = str(
                tokenizer.apply_chat_template(
                    messages, chat_template=template, tokenize=False, add_generation_prompt=goes_on
                )
            )
        except Exception as error:  # noqa: BLE001 (a template raises what it likes: for a role that it does not know, say)
            log.info("%s: the chat template refuses a conversation: %s", name, error)
            continue
        ids = [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
        vectors.append({"messages": messages, "add_generation_prompt": goes_on, "text": text, "token_ids": ids})
    bos = tokenizer.bos_token_id
    plain = [int(token) for token in tokenizer("a")["input_ids"]]
    turn_end = _turn_end(tokenizer, vectors)
    if turn_end is not None and turn_end not in stop_ids:
        log.warning(
            "%s: the chat template ends an answer with %r (id %d), which ends no text by the model's generation config:"
            " answers in chats may run on; add it to eos_token_id in generation_config.json, or to a request's"
            " stop_token_ids",
            *(name, tokenizer.convert_ids_to_tokens(turn_end), turn_end),
        )
    return {
        "depends_on_time": "strftime_now" in template,
        "begins_with_bos": {
            "text": bos is not None and plain[:1] == [bos],
            "chat": bos is not None and bool(vectors) and all(row["token_ids"][:1] == [bos] for row in vectors),
        },
        "stop_token_ids": stop_ids,
        "turn_end": turn_end,
        "vectors": vectors,
    }


def _turn_end(tokenizer: Any, vectors: list[dict[str, Any]]) -> int | None:
    """The first special token behind the answer that ends a conversation."""
    for row in vectors:
        last = row["messages"][-1]
        if last["role"] == "assistant":
            _, _, behind = row["text"].rpartition(last["content"])
            ids = [int(token) for token in tokenizer(behind, add_special_tokens=False)["input_ids"]]
            return next((token for token in ids if token in tokenizer.all_special_ids), None)
    return None
