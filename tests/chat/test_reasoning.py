"""The form in which models write reasoning, found by rendering, for templates in the styles of real models."""

from __future__ import annotations

import re

import pytest
from rendering import EACH, END, rendered, rendered_with

from inferc.chat.channels import HARMONY
from inferc.chat.form import find_form
from inferc.chat.reasoning import ReasoningForm, find_reasoning_form, reasoning_form_of

HEAD = "<|start|>{{ m.role }}\n"
ASKED = "{% if add_generation_prompt %}<|start|>assistant\n"
# Thoughts that stand in the content are taken from it, as where clients send answers back as they were written.
TAKEN = (
    "{% set said = m.content or '' %}{% set thought = m.reasoning_content or '' %}"
    "{% if '</think>' in said %}{% set thought = said.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set said = said.split('</think>')[-1].lstrip() %}{% endif %}"
)
CUT = "{{ (m.content or '').split('</think>')[-1] }}"
# The thoughts of the answers after the last question alone are written.
LAST = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
SWITCHABLE = (
    ASKED + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)

STYLES: dict[str, tuple[str, ReasoningForm | None]] = {
    "after the last question, and switched off by an empty one": (
        LAST
        + EACH
        + HEAD
        + TAKEN
        + "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
        + "{{ said }}<|end|>\n"
        + END
        + SWITCHABLE,
        ReasoningForm("<think>\n", "\n</think>\n\n", False, "enable_thinking", "<think>\n\n</think>\n\n"),
    ),
    "as before, but begun by the prompt": (
        LAST
        + EACH
        + HEAD
        + TAKEN
        + "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
        + "{{ said }}<|end|>\n"
        + END
        + ASKED
        + "<think>\n{% endif %}",
        ReasoningForm("<think>\n", "\n</think>\n\n", is_begun=True),
    ),
    "cut off every answer, and begun by the prompt": (
        EACH + "<|{{ m.role }}|>" + CUT + END + "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}",
        ReasoningForm("<think>\n", "</think>", is_begun=True),
    ),
    "cut off every answer": (
        EACH + HEAD + CUT + "<|end|>" + END + ASKED + "{% endif %}",
        ReasoningForm("<think>", "</think>"),
    ),
    "cut off earlier answers": (
        EACH + HEAD + "{% if not loop.last %}" + CUT + "{% else %}{{ m.content }}{% endif %}" + END,
        ReasoningForm("<think>", "</think>"),
    ),
    "switched on by a variable, and ended by the prompt otherwise": (
        EACH
        + "<|{{ m.role }}|>"
        + CUT
        + END
        + "{% if add_generation_prompt %}<|assistant|>{% if thinking %}<think>{% else %}</think>{% endif %}{% endif %}",
        ReasoningForm("<think>", "</think>", False, "thinking", "</think>"),
    ),
    "on a line of its own": (
        EACH
        + "<|{{ m.role }}|>"
        + TAKEN
        + "{% if m.role == 'assistant' %}{{ '\n' }}<think>{{ thought }}</think>{% endif %}{{ '\n' + said }}"
        + END
        + "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking %}"
        + "{{ '\n' }}<think></think>{% endif %}{% endif %}",
        ReasoningForm("\n<think>", "</think>\n", False, "enable_thinking", "<think></think>"),
    ),
    "in brackets": (
        EACH + "[{{ m.role }}]{% if m.thinking %}[THINK]{{ m.thinking }}[/THINK]{% endif %}{{ m.content }}" + END,
        ReasoningForm("[THINK]", "[/THINK]"),
    ),
    "asked for by the system's message": (
        "{% if enable_thinking | default(true) %}<|system|>Think.{% else %}<|system|>Do not think.{% endif %}"
        + EACH
        + "<|{{ m.role }}|>{% if m.reasoning %}<r>{{ m.reasoning }}</r>{% endif %}{{ m.content }}"
        + END,
        ReasoningForm("<r>", "</r>", False, "enable_thinking", ""),
    ),
    "in a channel": (
        EACH
        + "<|start|>{{ m.role }}{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
        + "<|start|>assistant{% endif %}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>"
        + "{{ m.content }}<|end|>"
        + END
        + "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        ReasoningForm(
            "<|channel|>analysis<|message|>",
            "<|end|><|start|>assistant<|channel|>final<|message|>",
            channels=HARMONY,
        ),
    ),
    "other tags": (EACH + HEAD + "{{ m.content }}<|end|></tool></s>" + END + ASKED + "<tool>x{% endif %}", None),
    "none": (EACH + HEAD + "{{ m.content }}<|end|>" + END + ASKED + "{% endif %}", None),
    "refused": (
        EACH + "{% if m.role == 'assistant' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}" + END,
        None,
    ),
}
CONTROLS = ("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "[THINK]", "[/THINK]")


@pytest.mark.parametrize("style", STYLES)
def test_the_form_is_what_stands_around_thoughts(style: str) -> None:
    template, expected = STYLES[style]
    form = find_form(rendered(template))
    assert form is not None
    assert find_reasoning_form(rendered_with(template), form, template, CONTROLS) == expected


def test_a_channel_that_is_text_is_a_form() -> None:
    template, _ = STYLES["in a channel"]
    form = find_form(rendered(template))
    assert form is not None
    found = find_reasoning_form(rendered_with(template), form, template)
    assert found is not None and found.opening == "<|channel|>analysis<|message|>"
    assert found.closing == "<|end|><|start|>assistant<|channel|>final<|message|>"


def test_the_form_is_kept_as_json() -> None:
    form = ReasoningForm("\n<think>\n", "\n</think>\n\n", True, "enable_thinking", "<think></think>")
    assert reasoning_form_of(form.to_json()) == form
    assert reasoning_form_of({**form.to_json(), "switch": None}).switch is None
    in_channels = ReasoningForm(HARMONY.begin, HARMONY.turn, channels=HARMONY)
    assert reasoning_form_of(in_channels.to_json()) == in_channels
    with pytest.raises(ValueError, match="channels: expected an object with start, role"):
        reasoning_form_of({**in_channels.to_json(), "channels": {"start": "a"}})
    assert (form.lead, form.opening, form.closing, form.trail) == ("\n", "<think>", "</think>", "\n\n")
    assert str(form) == (
        "\\n<think>\\n…\\n</think>\\n\\n, begun by the prompt, enable_thinking turns it off by <think></think>"
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"begin": 3}, "begin is 3, expected a text"),
        ({"end": " \n"}, "begin and end: expected texts that are not empty"),
        ({"is_begun": "yes"}, "is_begun is 'yes', expected true or false"),
        ({"more": ""}, "expected an object with begin, end, is_begun, switch, off, found {"),
    ],
)
def test_what_is_no_form_is_refused(change: dict[str, object], said: str) -> None:
    form = ReasoningForm("<think>", "</think>").to_json()
    with pytest.raises(ValueError, match=re.escape(said)):
        reasoning_form_of({**form, **change})
