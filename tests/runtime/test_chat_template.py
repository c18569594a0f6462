"""Chat templates: what Hugging Face's need works, and a hostile one can do nothing."""

from __future__ import annotations

from typing import Any

import pytest

from inferc.chat_form import ChatForm
from inferc.errors import RequestError
from inferc.runtime import chat_template
from inferc.runtime.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, ChatForm())
    return template.render(messages or MESSAGES, **options)


def test_what_templates_use() -> None:
    source = """{{ bos_token }}
{%- for message in messages %}
    {%- if loop.index0 == 5 %}{% break %}{% endif %}
    {%- generation %}[{{ message.role | upper }}] {{ message['content'] | trim }}{% endgeneration %}
{% endfor %}
{%- set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n ~ eos_token }}
{%- if add_generation_prompt %}>{% endif %}{% if tools %}{{ tools | tojson }}{% endif %}"""
    assert render(source, tools=[{"name": "<é>"}]) == '<s>[USER] hi1</s>>[{"name": "<é>"}]'
    assert render(source, add_generation_prompt=False) == "<s>[USER] hi1</s>"
    assert render("{{ strftime_now('%Y') }}").isdigit()
    assert (
        render("{{ '%s-%02d' % ('a', 3) }}{{ '{:>3}'.format(7) }}{{ 2 ** 3 }}{{ missing }}{{ none }}") == "a-03  78None"
    )
    assert render("{{ 'aba' | replace('a', 'cc') | indent(1) }}{{ ['x', 'y'] | join('-') }}") == "ccbccx-y"
    assert render("{{ date }}", date="today") == "today"
    template = ChatTemplate("{{ messages[0].role }}", {}, ChatForm())
    assert template.render(MESSAGES, self="me", messages="no") == "user"


def test_text_parts_become_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "ab"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"content": "x"}], r"messages\[0\]: expected an object with a role"),
        (["x"], r"messages\[0\]: expected an object"),
        ([{"role": "user", "content": 3}], "expected text, found 3"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "text parts only, found 'image_url'"),
    ],
)
def test_messages_that_make_no_sense(messages: list[Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render("{{ messages[0].content }}", messages)
    with pytest.raises(RequestError, match="at least one message"):
        ChatTemplate("x", {}, ChatForm()).render([])


def test_a_template_can_refuse() -> None:
    with pytest.raises(RequestError, match="refuses these messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ self.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{% include 'x' %}",
        "{% import 'os' as os %}",
        "{{ undefined_function() }}",
        "{{ 1 // 0 }}",
        "{{ messages[0] + 1 }}",
        "{% for x in",
        "{{ 'x' | no_such_filter }}",
    ],
)
def test_attacks_are_request_errors(source: str) -> None:
    with pytest.raises(RequestError):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10 ** 10 }}",
        "{{ ['a'] * (10 ** 9) }}",
        "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{{ 'x' | center(10 ** 10) }}",
        "{{ 'x'.ljust(10 ** 10) }}",
        "{{ '%99999999999d' % 1 }}",
        "{{ '{:>99999999999}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 10 ** 10) }}",
        "{{ ('a' * 100000) | replace('a', 'a' * 100000) }}",
        "{{ ('a' * 100000).replace('a', 'a' * 100000) }}",
        "{{ (('a' * 10000) | list) | join('b' * 10000) }}",
        "{% set a = ['x'] %}" + "{% set a = [a, a, a, a, a, a, a, a] %}" * 12 + "{{ a }}",
        "{% set a = ['x'] %}" + "{% set a = [a, a, a, a, a, a, a, a] %}" * 12 + "{{ a | tojson }}",
        "{% for a in range(99999) %}{% for b in range(999) %}{{ 'some text' }}{% endfor %}{% endfor %}",
        "{% set a = 'xxxxxxxx' %}" + "{% set a %}{{ a }}{{ a }}{% endset %}" * 40,
        "{% set a = 'xxxxxxxx' %}{% macro f(a) %}{{ a }}{{ a }}{% endmacro %}" + "{% set a = f(a) %}" * 40,
        "{% set a = 'xxxxxxxx' %}" + "{% set a %}{% filter upper %}{{ a }}{{ a }}{% endfilter %}{% endset %}" * 40,
        "{% set x = 3 %}" + "{% set x = x * x %}" * 40,
        "{% set x = [1] | batch(10 ** 9, 'x') | list %}",
        "{% set x = [1] | slice(10 ** 9) | list %}",
        "{% set x = 5 | round(-(10 ** 9)) %}",
        "{% set a = [1] %}" + "{% set a = [a, a] | sum(start=[]) %}" * 40,
        "{% set a = 'x' * 1000000 %}" + "{% set b = [a | upper, a[1:], a ~ 'x', b] %}" * 20,
        "{{ ('%s' * 1000) % (('x' * 100000,) * 1000) }}",
        "{{ ('{0}' * 1000).format('x' * 100000) }}",
        "{{ ('{0}' * 1000) | format('x' * 100000) }}{{ ('%s' * 1000) | format(*(('x' * 100000,) * 1000)) }}",
        "{{ range(9999) | map('string') | join('b' * 10000) }}",
        "{{ ('b' * 10000).join(range(9999) | map('string')) }}",
        "{{ ('\n' * 10000) | indent('b' * 10000) }}",
        "{{ range(9999) | list | tojson(separators=('b' * 10000, ':')) }}",
        "{{ ('a' * 10000).translate({97: 'b' * 10000}) }}",
        "{{ ('a ' * 500000) | title | wordcount }}",
        "{{ ('a ' * 500000).split() | length }}",
        "{% set a = '&' * 500000 %}{{ a | forceescape | length }}",
        "{{ ('www.a.b ' * 1000) | urlize(target='b' * 100000) }}",
    ],
)
def test_bombs_do_not_go_off(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_CHARS", 1 << 20)
    monkeypatch.setattr(chat_template, "MAX_BYTES", 1 << 24)
    with pytest.raises(RequestError, match="more than"):
        render(source)


def test_a_template_must_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.2)
    with pytest.raises(RequestError, match=r"more than 0.2 s"):
        render("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
    with pytest.raises(RequestError, match=r"more than 0.2 s"):
        render("{% set all = range(99999) %}{% for a in all %}{% for b in all %}{% endfor %}{% endfor %}")


def test_a_long_conversation_is_no_bomb() -> None:
    """Of two million characters, with what templates do with them."""
    source = (
        "{% set ns = namespace(text='') %}{% for m in messages %}"
        "{% set ns.text = ns.text ~ m.content.split('</think>')[-1].strip() | replace('<', '[') %}"
        "{% endfor %}{{ ns.text }}{{ messages | map(attribute='role') | unique | list | length }}"
        "{{ messages | groupby('role') | length }}"
    )
    messages = [{"role": "user", "content": "<i></think>" + "some " * 4000} for _ in range(100)]
    assert render(source, messages).startswith("some some") and len(render(source, messages)) == 100 * 19_999 + 2


def test_what_a_template_says_is_short() -> None:
    for source in ("{{ raise_exception('x' * 100000) }}", "{{ none[('x' * 100000)].y.z }}"):
        with pytest.raises(RequestError) as raised:
            render(source)
        assert len(str(raised.value)) < 1000
