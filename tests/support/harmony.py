"""A chat template in the style of gpt-oss's, whose answers are messages in channels, and its control tokens."""

from __future__ import annotations

TOKENS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>")
# Reasoning is written in the last answer, and before calls that no answer follows yet; the role of a call's message
# says whom it is for, and one call of a message is written.
HARMONY = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort | default('medium') }}<|end|>"
    "{% if tools or (messages[0].role in ('system', 'developer')) %}<|start|>developer<|message|>"
    "{% if messages[0].role in ('system', 'developer') %}{{ messages[0].content }}{% endif %}"
    "{% for tool in tools or [] %}// {{ tool.function.description }}\ntype {{ tool.function.name }}{% endfor %}"
    "<|end|>{% endif %}{% set ns = namespace(name=none) %}"
    "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls is defined %}"
    "{% set answered = namespace(is_so=false) %}{% for later in messages[loop.index:] %}"
    "{% if later.role == 'assistant' and later.tool_calls is not defined %}{% set answered.is_so = true %}{% endif %}"
    "{% endfor %}{% if m.content and m.thinking %}{{ raise_exception('both content and thinking') }}{% endif %}"
    "{% if (m.content or m.thinking) and not answered.is_so %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.content or m.thinking }}<|end|>{% endif %}"
    "{% set call = m.tool_calls[0].function %}{% set ns.name = call.name %}"
    "<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>"
    "{{ call.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}"
    "{% if loop.last and not add_generation_prompt %}{% if m.thinking %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% elif m.role == 'tool' %}{% if ns.name is none %}{{ raise_exception('no call before') }}{% endif %}"
    "<|start|>functions.{{ ns.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% elif m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
