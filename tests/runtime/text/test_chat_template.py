"""Chat templates: what Hugging Face's need works, and a hostile one can do nothing."""

from __future__ import annotations

from typing import Any

import pytest

from inferc.chat.form import ChatForm
from inferc.errors import RequestError
from inferc.runtime.text.chat_template import ChatTemplate
from inferc.runtime.text.template_sandbox import Sandbox
from inferc.system.worker_process import WorkerLimits

MESSAGES = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    """Return the prompt that the sandbox makes of messages, without a process."""
    values = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True, "tools": None}
    return Sandbox(source).render({**values, **options, "messages": messages or MESSAGES})


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
    template = ChatTemplate("{{ messages[0].content }}", {})
    assert template.render([{"role": "user", "content": parts}]) == "ab"
    template = ChatTemplate("{% for part in messages[0].content %}[{{ part.text }}]{% endfor %}", {})
    assert template.render([{"role": "user", "content": parts}]) == "[a][b]"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"content": "x"}], r"messages\[0\]: expected an object with a role"),
        (["x"], r"messages\[0\]: expected an object"),
        ([{"role": "user", "content": 3}], "expected text, found 3"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], 'text parts only, found "image_url"'),
    ],
)
def test_messages_that_make_no_sense(messages: list[Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ChatTemplate("{{ messages[0].content }}", {}, ChatForm()).render(messages)
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


GROW = (
    "{% set n = namespace(x=[1], y=[1]) %}"
    "{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}"
)
LIMITS = WorkerLimits(max_seconds=0.3, max_bytes=256 << 20)


@pytest.mark.parametrize(
    "source",
    [
        GROW + "{{ n.x == n.y }}",
        GROW + "{{ [n.x, n.y] | max }}",
        GROW + "{{ [n.x].index(n.y) }}",
        "{% set n = namespace(x=(1,)) %}{% for i in range(60) %}{% set n.x = (n.x, n.x) %}{% endfor %}{{ {n.x: 1} }}",
        (
            "{% set x = (1).from_bytes(('a' * 4000000).encode(), 'big') %}"
            "{{ (x // (1).from_bytes(('b' * 2000000).encode(), 'big')) % 7 }}"
        ),
        "{{ (['a' * 8000000] * 99999) | select('eq', 'a' * 8000000 ~ '') | list | length }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 1 }}" * 300000,
        "{% set x = 3 %}" + "{% set x = x * x %}" * 40,
        "{{ ('a ' * 5000000) | title | wordcount }}",
    ],
)
def test_a_template_ends(source: str) -> None:
    with pytest.raises(RequestError, match="chat template takes more than (0.3 s|256 MiB of memory)"):
        ChatTemplate(source, {}, ChatForm(), LIMITS).render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a'.encode().ljust(4000000000) | length }}",
        "{{ ('a'.encode() * 2000000000) | length }}",
        "{{ (1).to_bytes(4000000000, 'big') | length }}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ ['a'] * (10 ** 9) }}",
        "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{{ '{:>{}}'.format(1, 10 ** 10) }}",
        "{{ ('a' * 100000) | replace('a', 'a' * 100000) }}",
        pytest.param(
            "{% set a = ['x'] %}" + "{% set a = [a, a, a, a, a, a, a, a] %}" * 12 + "{{ a }}", marks=pytest.mark.slow
        ),
        "{% set a = 'xxxxxxxx' %}" + "{% set a %}{{ a }}{{ a }}{% endset %}" * 40,
        "{% set x = [1] | batch(10 ** 9, 'x') | list %}",
        "{{ ('%s' * 1000) % (('x' * 100000,) * 1000) }}{{ 'x' * 10 ** 9 }}",
    ],
)
def test_a_template_stays_small(source: str) -> None:
    """However much memory it asks for at once: the process has no more, and this one does not grow."""
    with pytest.raises(RequestError, match="chat template takes more than 256 MiB of memory"):
        ChatTemplate(source, {}, ChatForm(), WorkerLimits(30.0, LIMITS.max_bytes)).render(MESSAGES)


def test_a_long_text_is_refused() -> None:
    with pytest.raises(RequestError, match="writes more than 16777216 characters"):
        render("{% for i in range(20) %}{{ 'x' * 1000000 }}{% endfor %}")


def test_a_long_conversation_is_no_bomb() -> None:
    """Templates handle two million characters of conversation."""
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


def test_tools_that_would_be_left_out_are_refused() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {}, ChatForm(tools=False))
    assert template.values(MESSAGES, tools=None)["tools"] is None
    with pytest.raises(RequestError, match="tools: the model's chat template leaves them out"):
        template.values(MESSAGES, tools=[{"type": "function", "function": {"name": "f"}}])
