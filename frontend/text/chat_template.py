"""The chat template of a checkpoint for the artifact, with the texts that transformers renders by it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from jinja2 import TemplateSyntaxError

from inferc.chat.calls import CallForm, find_call_form
from inferc.chat.channels import find_channel_calls
from inferc.chat.form import ChatForm, Message, Render, find_form
from inferc.chat.named_forms import calls_by, check_forms, reasoning_by
from inferc.chat.reasoning import ReasoningForm, find_reasoning_form

log = logging.getLogger(__name__)

Conversation: TypeAlias = list[Message]

# Conversations that templates treat differently: who speaks first, whether an answer is to follow, spaces at the ends.
TEXT_CHATS: tuple[Conversation, ...] = (
    [{"role": "user", "content": "Hello, world!"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " two\nlines "}],
    [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "Café? 👩‍👩‍👧 <|im_"},
    ],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
)


def golden_chats(form: ChatForm) -> list[tuple[Conversation, Conversation]]:
    """Return conversations as clients send them, each with messages of the same meaning for a template of this form.

    Both are written out: what the runtime renders from the first is compared with what transformers renders from the
    second.
    """

    def said(role: str, *texts: str) -> Message:
        if form.content == "text":
            return {"role": role, "content": "".join(texts)}
        parts = texts if form.content == "parts" else ("".join(texts),)
        return {"role": role, "content": [{"type": "text", "text": text} for text in parts]}

    found = [(chat, [said(message["role"], message["content"]) for message in chat]) for chat in TEXT_CHATS]
    parts = [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "world!"}]
    found.append(([{"role": "user", "content": parts}], [said("user", "Hello, ", "world!")]))
    silent: Message = {"role": "assistant"}
    if form.no_content == "none":
        silent["content"] = None
    elif form.no_content == "empty":
        silent = said("assistant")
    user = {"role": "user", "content": "Is it warm in Zürich?"}
    asked = said("user", "Is it warm in Zürich?")
    found.append(([user, {"role": "assistant", "content": None}], [asked, silent]))
    if form.tool_calls is None:
        return found

    def call(arguments: Any) -> list[Message]:
        function = {"name": "get_weather", "arguments": arguments}
        return [{"id": "weather01", "type": "function", "function": function}]

    as_json, as_object = '{"city": "Zürich", "days": 2}', {"city": "Zürich", "days": 2}
    calls = {**silent, "tool_calls": call(as_object if form.tool_calls == "object" else as_json)}
    sent = {"role": "assistant", "content": None, "tool_calls": call(as_json)}
    found.append(([user, sent], [asked, calls]))
    found.append(([user, {"role": "assistant", "tool_calls": call(as_object)}], [asked, calls]))
    if form.tool_results:
        of_call = {"tool_call_id": "weather01", "name": "get_weather"}
        result = {"role": "tool", "content": '{"celsius": 21}', **of_call}
        found.append(([user, sent, result], [asked, calls, {**said("tool", '{"celsius": 21}'), **of_call}]))
    return found


def chat_template(tokenizer: Any) -> str | None:
    """Return the chat template of a tokenizer; of several named templates, the default."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        others = [name for name in template if name != "default"]
        if "default" not in template:
            log.warning("chat templates %s have no default: left out", ", ".join(template))
        elif others:
            log.warning("of several chat templates the default one is taken: %s left out", ", ".join(others))
        template = template.get("default")
    return None if template is None else str(template)


def golden_chat(
    tokenizer: Any,
    template: str,
    stop_ids: list[int],
    name: str,
    tool_format: str | None = None,
    reasoning_format: str | None = None,
) -> dict[str, Any]:
    """Return what transformers renders of `golden_chats` by the template, for comparison with the runtime.

    tool_format, reasoning_format: names of the forms of calls and reasoning, in place of those that are found.

    form: the form in which the template reads messages; null for a template that leaves out the user's words in every
    form. calls: the form in which it writes calls of tools, or null; reasoning: that of its reasoning, if any.
    vectors: [{messages, add_generation_prompt, text, token_ids}], without conversations that the template refuses.
    depends_on_time: whether texts hold the day on which they were made. begins_with_bos: whether a plain text, and a
    conversation, begin with BOS; a conversation has it from the template, never twice. stop_token_ids: the ids that end
    a text. turn_end: the first special token that the template writes after an answer. Warnings say if that token ends
    no text, and if the template refuses every one of `golden_chats` when it is run.
    """

    def render(messages: Sequence[Message], goes_on: bool, tools: Sequence[Message] | None) -> str:
        return _render(tokenizer, template, messages, goes_on, tools)

    form = find_form(render)
    calls, reasoning = _forms(tokenizer, template, form, name, tool_format, reasoning_format)
    vectors = _golden_vectors(tokenizer, render, form, name) if form is not None else []
    bos = tokenizer.bos_token_id
    plain = [int(token) for token in tokenizer("a")["input_ids"]]
    turn_end = _turn_end(tokenizer, vectors)
    if turn_end is not None and turn_end not in stop_ids:
        log.warning(
            "%s: the chat template ends an answer with %r (id %d), which ends no text by the model's generation config:"
            " answers in chats may run on; add it to eos_token_id in generation_config.json, or to a request's"
            " stop_token_ids",
            name,
            tokenizer.convert_ids_to_tokens(turn_end),
            turn_end,
        )
    return {
        "form": None if form is None else form.to_json(),
        "calls": None if calls is None else calls.to_json(),
        **({} if reasoning is None else {"reasoning": reasoning.to_json()}),
        "depends_on_time": "strftime_now" in template,
        "begins_with_bos": {
            "text": bos is not None and plain[:1] == [bos],
            "chat": bos is not None and bool(vectors) and all(row["token_ids"][:1] == [bos] for row in vectors),
        },
        "stop_token_ids": stop_ids,
        "turn_end": turn_end,
        "vectors": vectors,
    }


def _forms(
    tokenizer: Any,
    template: str,
    form: ChatForm | None,
    name: str,
    tool_format: str | None,
    reasoning_format: str | None,
) -> tuple[CallForm | None, ReasoningForm | None]:
    """Return the forms of calls and reasoning: those with these names, or else those that the template writes."""

    def render(messages: Sequence[Message], goes_on: bool, tools: Sequence[Message] | None) -> str:
        return _render(tokenizer, template, messages, goes_on, tools)

    def render_with(messages: Sequence[Message], goes_on: bool, variables: Mapping[str, Any]) -> str:
        return _render(tokenizer, template, messages, goes_on, None, variables)

    controls = [each.content for each in tokenizer.added_tokens_decoder.values() if each.special]
    found = None if form is None else find_call_form(render, form)
    thoughts = None if form is None else find_reasoning_form(render_with, form, template, controls)
    reasoning = reasoning_by(tool_format, reasoning_format, thoughts)
    if form is not None and reasoning is not None and reasoning.channels is not None:
        found = find_channel_calls(render, form, reasoning.channels)
    calls = found if tool_format is None else calls_by(tool_format, form, name)
    check_forms(calls, reasoning, controls, name)
    return calls, reasoning


def _golden_vectors(tokenizer: Any, render: Render, form: ChatForm, name: str) -> list[dict[str, Any]]:
    """Return what is rendered of `golden_chats`, without those that the template refuses; warn if these are all."""
    vectors: list[dict[str, Any]] = []
    refusal: Exception | None = None
    for messages, wanted in golden_chats(form):
        goes_on = messages[-1]["role"] != "assistant"
        try:
            text = render(wanted, goes_on, None)
        except Exception as error:  # noqa: BLE001 (a template may raise anything, such as for a role it does not know)
            log.info("%s: the chat template refuses a conversation: %s", name, error)
            refusal = error
            continue
        ids = [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
        vectors.append({"messages": messages, "add_generation_prompt": goes_on, "text": text, "token_ids": ids})
    # Templates that cannot be parsed, or have no form, are reported by the runtime's own check of the artifact instead.
    if refusal is not None and not vectors and not isinstance(refusal, TemplateSyntaxError):
        log.warning(
            "%s: the chat template refuses every conversation that was tried (%s): chats will be refused, plain prompts"
            " work; correct the template if it is to be used",
            name,
            " ".join(str(refusal).split())[:200],
        )
    return vectors


def _render(
    tokenizer: Any,
    template: str,
    messages: Sequence[Message],
    goes_on: bool,
    tools: Sequence[Message] | None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Return what transformers renders for a conversation.

    Messages with None are rendered by the function behind `apply_chat_template`, which itself would leave None out.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    conversation = [dict(message) for message in messages]
    options: dict[str, Any] = {
        "chat_template": template,
        "add_generation_prompt": goes_on,
        "tools": None if tools is None else [dict(tool) for tool in tools],
        **(variables or {}),
    }
    if any(value is None for message in conversation for value in message.values()):
        found: Any = render_jinja_template([conversation], **options, **tokenizer.special_tokens_map)
        return str(found[0][0])
    return str(tokenizer.apply_chat_template(conversation, tokenize=False, **options))


def _turn_end(tokenizer: Any, vectors: list[dict[str, Any]]) -> int | None:
    """Return the first special token after the answer that ends a conversation, or None."""
    for row in vectors:
        last = row["messages"][-1]
        if last["role"] == "assistant" and last.get("content"):
            _, _, behind = row["text"].rpartition(last["content"])
            ids = [int(token) for token in tokenizer(behind, add_special_tokens=False)["input_ids"]]
            return next((token for token in ids if token in tokenizer.all_special_ids), None)
    return None
