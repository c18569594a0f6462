"""The form in which models write calls of tools, found by rendering, for templates in the styles of real models."""

from __future__ import annotations

import re

import pytest
from call_styles import AGAIN, STYLES
from rendering import rendered

from inferc.chat.argument_tags import ArgumentTags
from inferc.chat.calls import NUMBER, CallForm, call_form_of, find_call_form
from inferc.chat.form import find_form


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
    assert "ids" not in form.to_json() and "arguments" not in form.to_json()
    tagged = CallForm("<f=", ">", "</f>", None, ArgumentTags("<p=", ">", "</p>"))
    assert call_form_of(tagged.to_json()) == tagged and str(tagged) == "<f=NAME><p=KEY>VALUE</p>…</f>"
    numbered = CallForm("<f=", f":{NUMBER}>", "", None, ids="numbered")
    assert call_form_of(numbered.to_json()) == numbered and str(numbered) == "<f=NAME:NUMBER>{…}"
    assert str(form) == '<tool_call>\\n{"name": "NAME", "arguments": {…}}\\n</tool_call>'


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"before": 3}, "before is 3, expected a text"),
        ({"before": ""}, "before and between: expected texts that are not empty"),
        ({"after": None}, "after is None, expected a text"),
        ({"ids": "mine"}, "ids is 'mine', expected one of ours, short, written, numbered"),
        ({"arguments": {}}, "arguments: expected an object with begin, middle, end, is_json"),
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
