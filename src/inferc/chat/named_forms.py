"""Forms of calls and of reasoning by the names that other servers give them, for a template that does not tell its own.

A form that is found by rendering the model's chat template (inferc.chat.calls, inferc.chat.reasoning) is the model's
own. These are for models whose template writes calls otherwise than they do, or not at all.
"""

from __future__ import annotations

from inferc.chat.argument_tags import ArgumentTags
from inferc.chat.calls import NUMBER, CallForm
from inferc.chat.reasoning import ReasoningForm

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
THINK = ReasoningForm("<think>\n", "\n</think>\n\n")
REASONING: dict[str, ReasoningForm] = {
    **dict.fromkeys(("deepseek_r1", "qwen3", "glm45", "kimi_k2", "minimax_m2"), THINK),
    "mistral": ReasoningForm("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningForm("<seed:think>", "</seed:think>"),
}
# Forms that people ask for by name and that are not built.
NOT_BUILT = {
    **dict.fromkeys(("openai", "harmony", "openai_gptoss", "gpt_oss", "openai/harmony"), "the channels of gpt-oss"),
    **dict.fromkeys(("pythonic", "llama4_pythonic", "olmo3"), "calls written as Python"),
}
