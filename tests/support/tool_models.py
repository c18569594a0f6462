"""A model whose chat template writes tools and their calls in a form of a few characters, and tools to offer it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rendering import EACH, END
from thinking import add_tokens

from inferc.compiler.build import compile
from inferc.config import CompileConfig

TEMPLATE = (
    "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}"
    + EACH
    + "<|{{ m.role }}|>{{ m.content or '' }}{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}="
    + "{{ call.function.arguments | tojson }}</call>"
    + END
    + END
    + "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# An answer has one call at most, between characters that are tokens of their own: a bias makes a model call by itself.
ONE_CALL = (
    "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}"
    + EACH
    + "<|{{ m.role }}|>{{ m.content or '' }}{% if m.tool_calls %}@{{ m.tool_calls[0].function.name }}="
    + "{{ m.tool_calls[0].function.arguments | tojson }}@{% endif %}"
    + END
    + "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Paris"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]


LISTED = "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}"
ANSWER = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
# Each argument in tags of its own.
TAGGED = (
    LISTED
    + EACH
    + "<|{{ m.role }}|>{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    + "<call>{{ call.function.name }}{% for key, value in call.function.arguments.items() %}"
    + "<key>{{ key }}</key><is>{{ value if value is string else value | tojson }}</is>{% endfor %}</call>"
    + END
    + END
    + ANSWER
)
# Control tokens, and ids that are made of names and numbers in place of names.
CONTROLS = ("<|calls|>", "<|call|>", "<|arguments|>", "<|/call|>", "<|/calls|>")
CONTROLLED = (
    LISTED
    + EACH
    + "<|{{ m.role }}|>{{ m.content or '' }}{% if m.tool_calls %}<|calls|>{% for call in m.tool_calls %}"
    + "<|call|>{{ call.id }}<|arguments|>{{ call.function.arguments | tojson }}<|/call|>"
    + END
    + "<|/calls|>{% endif %}"
    + END
    + ANSWER
)


def make_tooled(model: Path, folder: Path, template: str = TEMPLATE, controls: Sequence[str] = ()) -> None:
    """Compile a copy of a model with a template above; the artifact is `tooled` in the folder."""
    shutil.copytree(model, folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(template)
    add_tokens(folder / "model", controls, "control")
    compile(folder / "model", folder / "tooled", CompileConfig(certify="none"))


def check_arguments(name: str, arguments: Any) -> None:
    """Check that a call is of one of the tools above, and its arguments under that one's schema."""
    if name == "now":
        assert arguments == {}
    else:
        assert name == "get_weather" and arguments.keys() == {"city", "days"}
        assert arguments["city"] in ("Rome", "Paris") and 1 <= arguments["days"] <= 9
