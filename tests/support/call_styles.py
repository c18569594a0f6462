"""Chat templates in the styles of real models, each with the form in which it writes calls of tools."""

from __future__ import annotations

from rendering import EACH, END

from inferc.chat.argument_tags import ArgumentTags
from inferc.chat.calls import ID, NUMBER, CallForm

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
        CallForm("<f=", ">", "</f>", "</f><f=", ArgumentTags("<p=", ">", "</p>")),
    ),
    "as Python's keyword arguments": (
        chat(
            "{% if m.tool_calls %}<|calls|>[" + CALLS + "{{ call.function.name }}("
            "{% for name, value in call.function.arguments.items() %}{{ name }}={{ value | tojson }}"
            "{% if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}, {% endif %}" + END + "]{% endif %}"
        ),
        CallForm("<|calls|>[", "(", ")]", "), ", is_python=True),
    ),
    "arguments by Python's own words": (
        chat(
            CALLS + "<f={{ call.function.name }}>{% for name, value in call.function.arguments.items() %}"
            "{{ name }}={{ value | tojson }},{% endfor %}</f>" + END
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
    "as Qwen3-Coder": (
        chat(
            CALLS + "{{ '\n' }}<tool_call>\n<function={{ call.function.name }}>\n"
            "{% for name, value in call.function.arguments | items %}<parameter={{ name }}>\n"
            "{{ value | string if value is string or value is number else value | tojson }}\n</parameter>\n"
            "{% endfor %}</function>\n</tool_call>" + END
        ),
        CallForm(
            "\n<tool_call>\n<function=",
            ">",
            "\n</function>\n</tool_call>",
            "\n</function>\n</tool_call>\n<tool_call>\n<function=",
            ArgumentTags("\n<parameter=", ">\n", "\n</parameter>"),
        ),
    ),
    "as GLM 4.5": (
        chat(
            CALLS + "{{ '\n' }}<tool_call>{{ call.function.name }}\n"
            "{% for name, value in call.function.arguments.items() %}<arg_key>{{ name }}</arg_key>\n"
            "<arg_value>{{ value if value is string else value | tojson }}</arg_value>\n{% endfor %}</tool_call>" + END
        ),
        CallForm(
            "\n<tool_call>",
            "",
            "\n</tool_call>",
            "\n</tool_call>\n<tool_call>",
            ArgumentTags("\n<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"),
        ),
    ),
    "as MiniMax M2": (
        chat(
            "{% if m.tool_calls %}{{ '\n' }}<minimax:tool_call>\n"
            + CALLS
            + '<invoke name="{{ call.function.name }}">\n'
            '{% for name, value in call.function.arguments.items() %}<parameter name="{{ name }}">'
            "{{ value if value is string else value | tojson }}</parameter>\n{% endfor %}</invoke>\n"
            + END
            + "</minimax:tool_call>{% endif %}"
        ),
        CallForm(
            '\n<minimax:tool_call>\n<invoke name="',
            '">',
            "\n</invoke>\n</minimax:tool_call>",
            '\n</invoke>\n<invoke name="',
            ArgumentTags('\n<parameter name="', '">', "</parameter>"),
        ),
    ),
    "as Kimi K2": (
        chat(
            "{% if m.tool_calls %}<|tool_calls_section_begin|>" + CALLS + "<|tool_call_begin|>{{ call.id }}"
            "<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|>"
            + END
            + "<|tool_calls_section_end|>{% endif %}"
        ),
        CallForm(
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
            f":{NUMBER}<|tool_call_argument_begin|>",
            "<|tool_call_end|><|tool_calls_section_end|>",
            "<|tool_call_end|><|tool_call_begin|>functions.",
            ids="numbered",
        ),
    ),
    "as Mistral, in a list": (
        chat(
            "{% if m.tool_calls %}[TOOL_CALLS] [" + CALLS + "{% set said = call.function | tojson %}{{ said[:-1] }}"
            ', "id": "{{ call.id }}"}{% if not loop.last %}, {% endif %}' + END + "]{% endif %}"
        ),
        CallForm(
            '[TOOL_CALLS] [{"name": "',
            '", "arguments": ',
            f', "id": "{ID}"}}]',
            f', "id": "{ID}"}}, {{"name": "',
            ids="written",
        ),
    ),
    "as Mistral, one after the other": (
        chat(
            CALLS + "[TOOL_CALLS]{{ call.function.name }}[CALL_ID]{{ call.id }}[ARGS]"
            "{{ call.function.arguments | tojson }}" + END
        ),
        CallForm("[TOOL_CALLS]", f"[CALL_ID]{ID}[ARGS]", "", "[TOOL_CALLS]", ids="written"),
    ),
    "ids of nine characters alone": (
        chat(
            CALLS + "{% if call.id | length != 9 %}{{ raise_exception('id') }}{% endif %}"
            "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}" + END
        ),
        CallForm("[TOOL_CALLS]", "[ARGS]", "", "[TOOL_CALLS]", ids="short"),
    ),
    "as DeepSeek V3": (
        chat(
            "{% if m.tool_calls %}<｜tool▁calls▁begin｜>" + CALLS + "{% if not loop.first %}{{ '\n' }}{% endif %}"
            "<｜tool▁call▁begin｜>{{ call.type }}<｜tool▁sep｜>{{ call.function.name }}\n```json\n"
            "{{ call.function.arguments }}\n```<｜tool▁call▁end｜>" + END + "<｜tool▁calls▁end｜>{% endif %}"
        ),
        CallForm(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            "\n```json\n",
            "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        ),
    ),
    "as DeepSeek V3.1": (
        chat(
            "{% if m.tool_calls %}<｜tool▁calls▁begin｜>" + CALLS + "<｜tool▁call▁begin｜>{{ call.function.name }}"
            "<｜tool▁sep｜>{{ call.function.arguments }}<｜tool▁call▁end｜>" + END + "<｜tool▁calls▁end｜>{% endif %}"
        ),
        CallForm(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "<｜tool▁call▁end｜><｜tool▁call▁begin｜>",
        ),
    ),
    "no list of tools": (EACH + HEAD + TEXT + CALLS + OBJECT + END + END, None),
    "no calls": (chat(""), None),
}
