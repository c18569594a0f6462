"""The fields of the bodies of Anthropic's Messages API and their types, for checking and for describing them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from inferc.runtime.openai.fields import (
    ANY,
    CHAT,
    FLAG,
    INTEGER,
    LIST,
    MESSAGES,
    NOTHING,
    NUMBER,
    OBJECT,
    TEXTS,
    Field,
    Fields,
)

MESSAGE: Fields = {
    "model": CHAT["model"],
    "messages": Field(MESSAGES, "Each has a role and a content: a text, or blocks.", is_required=True),
    "max_tokens": Field(INTEGER, is_required=True),
    "system": Field(ANY, "What the model is told first: a text, or blocks of text."),
    "stop_sequences": Field(TEXTS, "Texts that end the answer, of which `stop_sequence` names the one that did."),
    "temperature": CHAT["temperature"],
    "top_p": Field(NUMBER),
    "top_k": Field(INTEGER),
    "stream": Field(FLAG),
    "metadata": Field(OBJECT, "user_id, a text; it changes nothing."),
    "tools": Field(LIST, "Each has a name, a description and an input_schema."),
    "tool_choice": Field(OBJECT, "type auto, any, tool (with a name) or none; disable_parallel_tool_use."),
    "thinking": Field(OBJECT, "type enabled (with budget_tokens), adaptive or disabled; display."),
    "output_config": Field(OBJECT, "format, a JSON Schema for the answer; effort, a variable of the model's template."),
}
COUNT: Fields = {**MESSAGE, "max_tokens": replace(MESSAGE["max_tokens"], is_required=False)}

# The names that OpenAI has for what this API calls otherwise.
OTHERWISE = {
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
# Unsupported fields, with the values that are accepted because they ask for nothing unsupported.
FIXED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "container",
            "context_management",
            "echo",
            "fallbacks",
            "logprobs",
            "mcp_servers",
            "output_format",
            "return_token_ids",
            "stream_options",
            "top_logprobs",
        ),
        NOTHING,
    ),
    "n": (None, 1),
    "prompt_logprobs": (None,),
    "speed": (None, "standard"),
}
# They are about a platform, or about a cache that needs no help.
IGNORED = frozenset(("cache_control", "diagnostics", "inference_geo", "user_profile_id", "workspace_id"))
# The fields of a chat that a message takes too: they are not Anthropic's, so they are not described.
BESIDE: Fields = {name: field for name, field in CHAT.items() if name not in {*MESSAGE, *FIXED, *OTHERWISE}}
