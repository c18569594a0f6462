"""Forms of calls and of reasoning by the names that other servers give them, for a template that does not tell its own.

A form that is found by rendering the model's chat template (inferc.chat.calls, inferc.chat.reasoning) is the model's
own. These are for models whose template writes calls otherwise than they do, or not at all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from inferc.chat.argument_tags import ArgumentTags
from inferc.chat.calls import NUMBER, CallForm
from inferc.chat.channels import HARMONY, is_in_channels
from inferc.chat.form import ChatForm
from inferc.chat.reasoning import ReasoningForm
from inferc.errors import ConfigError, nearest

LINES = ArgumentTags("\n<parameter=", ">\n", "\n</parameter>")
QWEN3_CODER = CallForm(
    "<tool_call>\n<function=",
    ">",
    "\n</function>\n</tool_call>",
    "\n</function>\n</tool_call>\n<tool_call>\n<function=",
    LINES,
)
CALLS: dict[str, CallForm] = {
    "hermes": CallForm(
        '<tool_call>\n{"name": "',
        '", "arguments": ',
        "}\n</tool_call>",
        '}\n</tool_call>\n<tool_call>\n{"name": "',
    ),
    "llama3_json": CallForm('{"name": "', '", "parameters": ', "}"),
    "granite": CallForm('<|tool_call|>[{"name": "', '", "arguments": ', "}]", '}, {"name": "'),
    "mistral": CallForm('[TOOL_CALLS][{"name": "', '", "arguments": ', "}]", '}, {"name": "', ids="short"),
    "mistral_args": CallForm("[TOOL_CALLS]", "[ARGS]", "", "[TOOL_CALLS]", ids="short"),
    "qwen3_coder": QWEN3_CODER,
    "qwen3_xml": QWEN3_CODER,
    "seed_oss": CallForm(
        "<seed:tool_call>\n<function=",
        ">",
        "\n</function>\n</seed:tool_call>",
        "\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=",
        ArgumentTags("\n<parameter=", ">", "</parameter>"),
    ),
    "glm45": CallForm(
        "<tool_call>",
        "",
        "\n</tool_call>",
        "\n</tool_call>\n<tool_call>",
        ArgumentTags("\n<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"),
    ),
    "glm47": CallForm(
        "<tool_call>",
        "",
        "</tool_call>",
        "</tool_call><tool_call>",
        ArgumentTags("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
    ),
    "minimax_m2": CallForm(
        '<minimax:tool_call>\n<invoke name="',
        '">',
        "\n</invoke>\n</minimax:tool_call>",
        '\n</invoke>\n<invoke name="',
        ArgumentTags('\n<parameter name="', '">', "</parameter>"),
    ),
    "kimi_k2": CallForm(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
        f":{NUMBER}<|tool_call_argument_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
        "<|tool_call_end|><|tool_call_begin|>functions.",
        ids="numbered",
    ),
    "deepseek_v3": CallForm(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n```json\n",
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    ),
    "deepseek_v31": CallForm(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>",
    ),
}
# Lists as Python writes them, without a marker; Llama 3.2 and 4 write such if their prompts ask for it.
PYTHONIC = CallForm("[", "(", ")]", "), ", is_python=True)
CALLS |= dict.fromkeys(("pythonic", "llama4_pythonic"), PYTHONIC)
CALLS["olmo3"] = CallForm("<function_calls>", "(", ")</function_calls>", ")\n", is_python=True)
CALLS["lfm2"] = CallForm("<|tool_call_start|>[", "(", ")]<|tool_call_end|>", "), ", is_python=True)
# The names of gpt-oss's channels in other servers.
OF_HARMONY = ("harmony", "openai", "openai_gptoss", "gpt_oss", "gpt-oss")
CALLS |= dict.fromkeys(OF_HARMONY, HARMONY.call_form)
THINK = ReasoningForm("<think>\n", "\n</think>\n\n")
REASONING: dict[str, ReasoningForm] = {
    **dict.fromkeys(("deepseek_r1", "qwen3", "glm45", "kimi_k2", "minimax_m2"), THINK),
    "mistral": ReasoningForm("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningForm("<seed:think>", "</seed:think>"),
    **dict.fromkeys(OF_HARMONY, ReasoningForm(HARMONY.begin, HARMONY.turn, channels=HARMONY)),
}


def check_names(calls: str | None, reasoning: str | None) -> None:
    """Raise ConfigError for a name of a form of calls, or of reasoning, that is unknown."""
    if calls is not None:
        named_call_form(calls)
    if reasoning is not None:
        named_reasoning_form(reasoning)


def named_call_form(name: str) -> CallForm:
    """Return the form of calls with this name; raise ConfigError for an unknown one."""
    _check("--tool-format", CALLS, name)
    return CALLS[name]


def named_reasoning_form(name: str) -> ReasoningForm:
    """Return the form of reasoning with this name; raise ConfigError for an unknown one."""
    _check("--reasoning-format", REASONING, name)
    return REASONING[name]


def _check(option: str, known: Mapping[str, Any], name: str) -> None:
    if name not in known:
        raise ConfigError(f"{option} {name}: {nearest(name, known)}; leave it out for the form of the chat template")


def calls_by(name: str, form: ChatForm | None, model: str) -> CallForm:
    """Return the form of calls with a name, for a model whose template reads messages of this form.

    Raises ConfigError for an unknown name, and for a template that writes no tools.
    """
    found = named_call_form(name)
    if form is None or not form.tools:
        raise ConfigError(
            f"--tool-format {name}: the chat template of {model} writes no list of tools, so the model would not see"
            " them; leave it out, or give the checkpoint a template that does"
        )
    return found


def reasoning_by(calls: str | None, reasoning: str | None, found: ReasoningForm | None) -> ReasoningForm | None:
    """Return the form of reasoning for names of the two forms; found: that of the template.

    Calls in channels have theirs. What the template has of its own for the same markers stays: how it turns them off.
    """
    named = None if reasoning is None else named_reasoning_form(reasoning)
    has_channels = found is not None and found.channels is not None
    if calls is not None and is_in_channels(named_call_form(calls)) and named is None and not has_channels:
        named = named_reasoning_form(calls)
    if named is None or found is None:
        return named or found
    is_same = (named.opening, named.closing, named.channels) == (found.opening, found.closing, found.channels)
    return found if is_same else named


def check_forms(
    calls: CallForm | None, reasoning: ReasoningForm | None, control_tokens: Collection[str], model: str
) -> None:
    """Raise ConfigError for forms that one model cannot have, or without tokens that they are made of."""
    if (fault := fault_of(calls, reasoning)) is not None:
        raise ConfigError(f"--tool-format, --reasoning-format: {fault}")
    needed = () if reasoning is None or reasoning.channels is None else reasoning.channels.tokens
    if missing := [each for each in needed if each not in control_tokens]:
        raise ConfigError(
            f"--reasoning-format: the tokenizer of {model} has no control token {missing[0]}, of which the headers of"
            " channels are made; name another form, or leave it out"
        )


def fault_of(calls: CallForm | None, reasoning: ReasoningForm | None) -> str | None:
    """Return why a model cannot write calls and reasoning of these forms; None if it can."""
    has_channels = reasoning is not None and reasoning.channels is not None
    if calls is None or is_in_channels(calls) == has_channels:
        return None
    found = (
        "calls are messages in a channel, and reasoning is not"
        if not has_channels
        else ("reasoning is a message in a channel, and calls are not")
    )
    return f"{found}; name harmony for both, or for neither"
