"""Chat templates of tests, rendered by transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from inferc.chat.form import Message

EACH = "{% for m in messages %}"
END = "{% endfor %}"


def rendered(template: str) -> Any:
    render = rendered_with(template)
    return lambda messages, goes_on, tools: render(messages, goes_on, {}, tools)


def rendered_with(template: str) -> Any:
    """Return what renders conversations with variables of the template."""

    def render(
        messages: Sequence[Message],
        goes_on: bool,
        variables: Mapping[str, Any],
        tools: Sequence[Message] | None = None,
    ) -> str:
        found: Any = render_jinja_template(
            [list(messages)],
            None if tools is None else list(tools),
            chat_template=template,
            add_generation_prompt=goes_on,
            **variables,
        )
        return str(found[0][0])

    return render
