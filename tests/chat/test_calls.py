"""The form in which models write calls of tools, found by rendering, for templates in the styles of real models."""

from __future__ import annotations

import re

import pytest
from rendering import EACH, END, rendered

from inferc.chat.calls import CallForm, call_form_of, find_call_form
from inferc.chat.form import find_form

LISTED = "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
HEAD = "<|start|>{{ m.role }}\n"
TEXT = "{{ m.content or '' }}"
OBJECT = '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
CALLS = "{% for call in m.tool_calls or [] %}"


def chat(calls: str, end: str = "<|end|>\n") -> str:
    return LISTED + EACH + HEAD + TEXT + calls + end + END


AGAIN = '}\n</tool_call>\n<tool_call>\n{"name": "'
STYLES = {
    "each in a tag of its own": (
        chat(
            CALLS + "{% if not loop.first %}{{ '\\n' }}{% endif %}<tool_call>\n" + OBJECT + "\n</tool_call>" + END,
        ),
        CallForm('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", AGAIN),
    ),
    "one at most, without a marker": (
        chat(
            "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}"
            "{% set call = m.tool_calls[0] %}"
            '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}{% endif %}'
        ),
        CallForm('{"name": "', '", "parameters": ', "}", None),
    ),
    "in a list": (
        chat(
            "{% if m.tool_calls %}[CALLS] [" + CALLS + OBJECT + "{% if not loop.last %}, {% endif %}" + END + "]"
            "{% endif %}"
        ),
        CallForm('[CALLS] [{"name": "', '", "arguments": ', "}]", '}, {"name": "'),
    ),
    "markers around a name and a block of JSON": (
        chat(
            "{% if m.tool_calls %}<|calls|>" + CALLS + "<|call|>function<|sep|>{{ call.function.name }}\n```json\n"
            "{{ call.function.arguments | tojson }}\n```<|done|>" + END + "<|all done|>{% endif %}"
        ),
        CallForm(
            "<|calls|><|call|>function<|sep|>",
            "\n```json\n",
            "\n```<|done|><|all done|>",
            "\n```<|done|><|call|>function<|sep|>",
        ),
    ),
    "users are refused after a call": (
        LISTED
        + "{% for m in messages %}{% if not loop.first and m.role == 'user' and loop.previtem.tool_calls %}"
        + "{{ raise_exception('no result') }}{% endif %}"
        + HEAD
        + TEXT
        + CALLS
        + "<f={{ call.function.name }}>{{ call.function.arguments | tojson }}</f>"
        + END
        + "<|end|>"
        + END,
        CallForm("<f=", ">", "</f>", "</f><f="),
    ),
    "thoughts before the last answer": (
        LISTED
        + EACH
        + HEAD
        + "{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
        + TEXT
        + CALLS
        + "<tool_call>\n"
        + OBJECT
        + "\n</tool_call>"
        + END
        + "<|end|>"
        + END,
        CallForm('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", AGAIN.replace(">\n<", "><")),
    ),
    "with an id": (chat(CALLS + '{"id": "{{ call.id }}", ' + OBJECT[1:] + END), None),
    "arguments one by one": (
        chat(
            CALLS + "<f={{ call.function.name }}>{% for name, value in call.function.arguments.items() %}"
            "<p={{ name }}>{{ value }}</p>{% endfor %}</f>" + END
        ),
        None,
    ),
    "numbered": (
        chat(
            CALLS + "<f={{ call.function.name }}:{{ loop.index0 }}>{{ call.function.arguments | tojson }}</f>" + END,
        ),
        CallForm("<f=", ":0>", "</f>", None),
    ),
    "each in an answer of its own": (
        LISTED
        + EACH
        + "{% for call in m.tool_calls or [none] %}"
        + HEAD
        + "{% if call %}<f={{ call.function.name }}>{{ call.function.arguments | tojson }}</f>{% else %}"
        + TEXT
        + "{% endif %}<|end|>"
        + END
        + END,
        CallForm("<f=", ">", "</f>", None),
    ),
    "the name twice": (
        chat(
            CALLS + "<f={{ call.function.name }}>{{ call.function.arguments | tojson }}</{{ call.function.name }}>"
            "{% endfor %}"
        ),
        None,
    ),
    "nothing but a line break before the name": (
        chat(CALLS + "{{ '\n' }}{{ call.function.name }} {{ call.function.arguments | tojson }}" + END),
        None,
    ),
    "arguments first": (chat(CALLS + "{{ call.function.arguments | tojson }} to {{ call.function.name }}" + END), None),
    "no list of tools": (EACH + HEAD + TEXT + CALLS + OBJECT + END + END, None),
    "no calls": (chat(""), None),
}


@pytest.mark.parametrize("style", STYLES)
def test_the_form_is_what_stands_around_names_and_arguments(style: str) -> None:
    template, expected = STYLES[style]
    render = rendered(template)
    form = find_form(render)
    assert form is not None and find_call_form(render, form) == expected


def test_the_form_is_kept_as_json() -> None:
    form = CallForm('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", AGAIN)
    assert call_form_of(form.to_json()) == form
    assert call_form_of({**form.to_json(), "joint": None}).joint is None
    assert str(form) == '<tool_call>\\n{"name": "NAME", "arguments": {…}}\\n</tool_call>'


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"before": 3}, "before is 3, expected a text"),
        ({"before": ""}, "before and between: expected texts that are not empty"),
        ({"after": None}, "after is None, expected a text"),
        ({"more": ""}, "expected an object with before, between, after, joint, found {"),
    ],
)
def test_what_is_no_form_is_refused(change: dict[str, object], said: str) -> None:
    form = CallForm("<f=", ">", "</f>", None).to_json()
    with pytest.raises(ValueError, match=re.escape(said)):
        call_form_of({**form, **change})


@pytest.mark.parametrize(
    ("before", "trigger"),
    [
        ('<tool_call>\n{"name": "', "<tool_call>"),
        ('[CALLS] [{"name": "', "[CALLS]"),
        ('{"name": "', '{"name": "'),
        ("<f=", "<f="),
    ],
)
def test_the_trigger_is_the_marker(before: str, trigger: str) -> None:
    assert CallForm(before, ">", "").trigger == trigger
