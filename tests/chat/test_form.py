"""The form in which a chat template reads messages, found by rendering, for templates in the styles of real models."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from rendering import EACH, END, rendered

from inferc.chat.form import ChatForm, find_form, form_of

PARTS = "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
CALLS = (
    "{% for call in m.tool_calls or [] %}"
    "<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>{% endfor %}"
)

STYLES = {
    "plus": (
        EACH + "{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}" + END,
        ChatForm("text", "empty", None, tools=False),
    ),
    "trim": (EACH + "<{{ m.role }}>{{ m.content | trim }}" + END, ChatForm("text", "absent", None, tools=False)),
    "capitals": (
        EACH + "{{ m.role | upper }}: {{ m.content | upper }}" + END,
        ChatForm("text", "absent", None, tools=False),
    ),
    "parts": (EACH + "{{ m.role }}: " + PARTS + END, ChatForm("parts", "absent", None, tools=False)),
    "first part": (EACH + "{{ m.role }}: {{ m.content[0].text }}" + END, ChatForm("part", "empty", None, tools=False)),
    "either": (
        EACH
        + "{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
        + PARTS
        + "{% endif %}"
        + CALLS
        + END,
        ChatForm(tools=False),
    ),
    "parts and calls": (EACH + "{{ m.role }}: " + PARTS + CALLS + END, ChatForm("parts", tools=False)),
    "if content": (
        EACH + "<{{ m.role }}>{% if m.content %}{{ '\n' + m.content }}{% endif %}" + CALLS + END,
        ChatForm(tools=False),
    ),
    "is none": (
        EACH + "{% if m['role'] == 'assistant' and m['content'] is none %}"
        "{% for call in m['tool_calls'] %}"
        "{{ 'CALL ' + call['function']['name'] + ' ' + call['function']['arguments'] }}{% endfor %}"
        "{% else %}{{ m['role'] + ': ' + m['content'] }}{% endif %}" + END,
        ChatForm("text", "none", "json", calls_beside_text=False, tools=False),
    ),
    "method": (
        EACH + "{{ m.role }}: {{ m.content.split('</think>')[-1] }}" + CALLS + END,
        ChatForm("text", "empty", tools=False),
    ),
    "items": (
        EACH + "{{ m.role }}: {{ m.content }}{% for call in m.tool_calls %}"
        "{% for name, value in call.function.arguments.items() %}<{{ name }}>{{ value }}</{{ name }}>{% endfor %}"
        "{% endfor %}" + END,
        ChatForm(tools=False),
    ),
    "no results": (
        EACH + "{% if m.role != 'tool' %}{{ m.role }}: {{ m.content }}{% endif %}" + CALLS + END,
        ChatForm(tool_results=False, tools=False),
    ),
    "only with tools": (
        "{% if tools %}"
        + EACH
        + "{{ m.role }}: {{ m.content }}"
        + CALLS
        + END
        + "{% else %}"
        + EACH
        + "{{ m.content }}"
        + END
        + "{% endif %}",
        ChatForm(tools=False),
    ),
    "holds the word": (
        "Choose one of yes, no and None. " + EACH + "{{ m.content }}" + CALLS + END,
        ChatForm(tools=False),
    ),
    "last alone": (
        "Judge: {{ messages[-1].content }}",
        ChatForm("text", "absent", None, tools=False, system=False, developer=False),
    ),
    "no system": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + EACH + PARTS + END,
        ChatForm("parts", "absent", None, tools=False),
    ),
    "refuses all": ("{{ raise_exception('not today') }}", ChatForm()),
    "no words": (EACH + "{{ m.role }}" + END, None),
    "lists as they are": ("{{ messages[0].content if messages[0].content is not string else '' }}", None),
    "parts of users alone": (
        EACH + "{{ m.role }}: {% if m.role == 'user' %}" + PARTS + "{% else %}{{ m.content }}{% endif %}" + END,
        None,
    ),
    "tools": (
        EACH
        + "{{ m.role }}: {{ m.content }}"
        + CALLS
        + END
        + "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}",
        ChatForm(),
    ),
    "known roles": (
        EACH
        + "{% if m.role in ['system', 'user', 'assistant', 'tool'] %}{{ m.role }}: {{ m.content }}{% endif %}"
        + CALLS
        + END,
        ChatForm(tools=False, developer=False),
    ),
    "users and assistants": (
        EACH + "{% if m.role in ['user', 'assistant'] %}{{ m.role }}: {{ m.content }}{% endif %}" + END,
        ChatForm(tool_calls=None, tool_results=False, tools=False, system=False, developer=False),
    ),
}


@pytest.mark.parametrize("name", STYLES)
def test_the_form_is_found_by_what_arrives(name: str) -> None:
    template, form = STYLES[name]
    assert find_form(rendered(template)) == form


def test_a_form_is_stored_and_said() -> None:
    form = ChatForm("parts", "none", "json", tool_results=False)
    assert form_of(asdict(form)) == form
    assert str(form) == (
        "content as a list of parts, null content as none, arguments of tool calls as JSON, no tool results"
    )
    assert str(ChatForm(tool_calls=None)) == "content as text, no tool calls"
    nothing = ChatForm(tool_calls=None, tool_results=False, tools=False, system=False, developer=False)
    assert str(nothing) == (
        "content as text, no tool calls, no tool results, no list of tools, no system messages, no developer messages"
    )
    assert str(ChatForm(developer=False)) == (
        "content as text, arguments of tool calls as an object, developer messages as system messages"
    )
    assert str(ChatForm("part", tools=False, calls_beside_text=False, system=False)) == (
        "content as a list of one part, arguments of tool calls as an object, no calls beside text, no list of tools,"
        " no system messages"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"content": "tensor"}, "content is 'tensor', expected one of 'text', 'parts', 'part'"),
        ({"tool_results": 1}, "tool_results is 1, expected one of False, True"),
        ({"tool_calls": []}, "tool_calls is .*, expected one of None, 'object', 'json'"),
        ({"more": 1}, "expected an object with content, no_content, tool_calls, tool_results"),
    ],
)
def test_what_is_no_form(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        form_of({**asdict(ChatForm()), **change})
