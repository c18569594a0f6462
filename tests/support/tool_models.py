"""A model whose chat template writes tools and their calls in a form of a few characters, and tools to offer it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from rendering import EACH, END

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


def make_tooled(model: Path, folder: Path, template: str = TEMPLATE) -> None:
    """Compile a copy of a model with one of the templates above; the artifact is `tooled` in the folder."""
    shutil.copytree(model, folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(template)
    compile(folder / "model", folder / "tooled", CompileConfig(certify="none"))


def check_arguments(name: str, arguments: Any) -> None:
    """Check that a call is of one of the tools above, and its arguments under that one's schema."""
    if name == "now":
        assert arguments == {}
    else:
        assert name == "get_weather" and arguments.keys() == {"city", "days"}
        assert arguments["city"] in ("Rome", "Paris") and 1 <= arguments["days"] <= 9
