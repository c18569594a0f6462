"""The form in which a model writes its reasoning, found by how its chat template writes that of a history.

A model that reasons writes its thoughts between two markers, and its answer behind them. Some templates write a
message's `reasoning_content` there, at least in the last answer; others cut it off the content by the marker of its
end; some write the marker of its beginning at the end of a prompt, so that the model goes on within it. Conversations
are rendered to see which of this a template does: markers are what stands around the thoughts.

Markers that are made of several control tokens (`<|channel|>analysis<|message|>`) are the headers of messages in
channels (inferc.chat.channels), if they can be told as such.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from os.path import commonprefix
from typing import Any, TypeAlias

from inferc.chat.calls import NEXT, SAID, USER, content_of
from inferc.chat.channels import Channels, channels_of, find_channels
from inferc.chat.form import ChatForm, Message

# Renders messages, with or without the beginning of an answer, with variables; raises where the template does.
RenderWith: TypeAlias = Callable[[Sequence[Message], bool, Mapping[str, Any]], str]

THOUGHT = "Zqthought"
SWITCHES = ("enable_thinking", "thinking")  # variables by which templates turn reasoning on and off
CLOSING = re.compile(r"</[\w:.-]+>|\[/[A-Z_]+\]")  # a marker of an end, as templates spell it


@dataclass(frozen=True)
class ReasoningForm:
    r"""The form of an answer's reasoning: `begin`, the thoughts, `end`, with the spaces and line breaks beside them.

    - is_begun: a prompt without variables ends with `begin`.
    - switch: the variable of the template that turns reasoning on and off; off: what the prompt then has for it.
    - channels: those in which the answer has its reasoning and its text, if each is a message of its own.
    """

    begin: str
    end: str
    is_begun: bool = False
    switch: str | None = None
    off: str = ""
    channels: Channels | None = None

    def __str__(self) -> str:
        """Return an example of reasoning, as `inferc inspect` shows it."""
        shown = f"{self.begin}…{self.end}"
        begun = ", begun by the prompt" if self.is_begun else ""
        switched = f", {self.switch} turns it off" if self.switch else ""
        written = f" by {self.off}" if self.off else ""
        return (shown + begun + switched + written).replace("\n", "\\n")

    @property
    def opening(self) -> str:
        """The marker of the beginning."""
        return self.begin.strip()

    @property
    def closing(self) -> str:
        """The marker of the end."""
        return self.end.strip()

    @property
    def lead(self) -> str:
        """The spaces and line breaks that stand before the marker of the beginning."""
        return self.begin[: len(self.begin) - len(self.begin.lstrip())]

    @property
    def trail(self) -> str:
        """The spaces and line breaks that stand behind the marker of the end."""
        return self.end[len(self.end.rstrip()) :]

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        return {name: value for name, value in found.items() if name != "channels" or value is not None}


def reasoning_form_of(value: Any) -> ReasoningForm:
    """Return the form that an artifact holds; raise ValueError for what is none."""
    names = ("begin", "end", "is_begun", "switch", "off")
    if not isinstance(value, Mapping) or value.keys() - {"channels"} != set(names):
        raise ValueError(f"expected an object with {', '.join(names)}, found {value!r:.100}")
    for name in names:
        is_right = isinstance(value[name], bool if name == "is_begun" else str)
        if not is_right and not (name == "switch" and value[name] is None):
            expected = "true or false" if name == "is_begun" else "a text"
            raise ValueError(f"{name} is {value[name]!r:.40}, expected {expected}")
    if not value["begin"].strip() or not value["end"].strip():
        raise ValueError("begin and end: expected texts that are not empty")
    channels = None if value.get("channels") is None else channels_of(value["channels"])
    return ReasoningForm(**{**value, "channels": channels})


def find_reasoning_form(
    render: RenderWith, form: ChatForm, source: str, control_tokens: Sequence[str] = ()
) -> ReasoningForm | None:
    """Return the form in which a template writes reasoning, for the form in which it reads messages.

    source: the template's, which spells markers that it cuts off. control_tokens: those that no text can spell. None:
    it writes no reasoning, or in a form that cannot be told (see the module).
    """
    prompt = _text(render, [_user(form, USER)], True)
    if prompt is None:
        return None
    found = _written(render, form, prompt) or _cut_off(render, form, prompt, source)
    if found is None:
        return None
    begin, end = found
    if (channels := find_channels(begin, end, control_tokens)) is not None:
        return ReasoningForm(channels.begin, channels.turn, channels=channels)
    opening, closing = begin.strip(), end.strip()
    has_control = any(name in each and name != each for each in (opening, closing) for name in control_tokens)
    if has_control or (opening in control_tokens) != (closing in control_tokens):
        return None  # the text does not show control tokens: both markers are read as such, or as text
    switch, off = _switch(render, form, opening, closing)
    return ReasoningForm(begin, end, prompt.rstrip().endswith(opening), switch, off)


def _written(render: RenderWith, form: ChatForm, prompt: str) -> tuple[str, str] | None:
    """Return what stands around the thoughts of the last answer, or None if the template does not write them."""
    message = {"role": "assistant", "content": content_of(form, SAID), "thinking": THOUGHT, "reasoning": THOUGHT}
    text = _text(render, [_user(form, USER), {**message, "reasoning_content": THOUGHT}], False)
    if text is None or text.count(THOUGHT) != 1:
        return None
    before, _, behind = text.partition(THOUGHT)
    end, is_there, _ = behind.partition(SAID)
    if not is_there or not end.strip():
        return None
    opening = _opening(end.strip())
    if opening is not None and (at := before.rfind(opening)) >= 0:
        lead = before[len(prompt) : at] if before.startswith(prompt) else ""
        return (lead if not lead.strip() else "") + before[at:], end
    begin = before[len(commonprefix([before, prompt])) :]
    return (begin, end) if begin.strip() else None


def _cut_off(render: RenderWith, form: ChatForm, prompt: str, source: str) -> tuple[str, str] | None:
    """Return the markers of thoughts that the template cuts off the content, or that its prompts end with."""
    for closing in dict.fromkeys(CLOSING.findall(source)):
        opening = _opening(closing)
        assert opening is not None, "it has the form of an end"
        if prompt.rstrip().endswith(opening):
            return prompt[prompt.rindex(opening) :], closing
        written = f"{opening}\n{THOUGHT}\n{closing}\n\n{SAID}"
        answer = {"role": "assistant", "content": content_of(form, written)}
        for then in ([], [_user(form, NEXT)]):
            text = _text(render, [_user(form, USER), answer, *then], False)
            if text is not None and SAID in text and THOUGHT not in text:
                return opening, closing
    return None


def _switch(render: RenderWith, form: ChatForm, opening: str, closing: str) -> tuple[str | None, str]:
    """Return the variable that turns reasoning off, if there is one, and what a prompt then has in its place."""
    for name in SWITCHES:
        texts = []
        for value in (True, False):
            try:
                texts.append(render([_user(form, USER)], True, {name: value}))
            except Exception:  # noqa: BLE001 (a template raises whatever its operators do)
                break
        if len(texts) < 2 or texts[0] == texts[1]:
            continue
        tail = texts[1].rpartition(USER)[2]
        places = [at for marker in (opening, closing) if (at := tail.find(marker)) >= 0]
        return name, tail[min(places) :] if places else ""
    return None, ""


def _opening(closing: str) -> str | None:
    """Return the marker of the beginning that belongs to one of an end, if that has the usual form."""
    return closing.replace("/", "", 1) if CLOSING.fullmatch(closing) else None


def _user(form: ChatForm, words: str) -> Message:
    return {"role": "user", "content": content_of(form, words)}


def _text(render: RenderWith, messages: Sequence[Message], goes_on: bool) -> str | None:
    """Return what is rendered after the first words of the user, or None if the template raises or leaves them out."""
    try:
        text = render(messages, goes_on, {})
    except Exception:  # noqa: BLE001 (a template raises whatever its operators do)
        return None
    _, is_there, behind = text.partition(USER)
    return behind if is_there else None
