"""Forms of calls and reasoning that a run names in place of those that the artifact was compiled with."""

from __future__ import annotations

import json
from dataclasses import replace

from inferc.chat.calls import call_form_of
from inferc.chat.form import form_of
from inferc.chat.named_forms import calls_by, check_forms, reasoning_by
from inferc.chat.reasoning import reasoning_form_of
from inferc.errors import ConfigError
from inferc.runtime.text.files import TextFiles

GOLDEN = "golden_chat.json"


def with_forms(files: TextFiles, tool_format: str | None, reasoning_format: str | None) -> TextFiles:
    """Return an artifact's files with the forms of these names; None: those that it has.

    Raises ConfigError for unknown names, for forms that one model cannot have, and for an artifact without a chat
    template, or without the tokens that a form is made of.
    """
    if tool_format is None and reasoning_format is None:
        return files
    option = f"--tool-format {tool_format}" if tool_format else f"--reasoning-format {reasoning_format}"
    name = str(files.folder.parent.name)
    kept, tokenizer = files.json(GOLDEN, dict), files.json("tokenizer.json", dict)
    if kept is None or tokenizer is None or "chat_template.jinja" not in files.contents:
        raise ConfigError(f"{option}: {name} has no chat template, so no chats; leave it out")
    form = None if kept.get("form") is None else form_of(kept["form"])
    calls = None if kept.get("calls") is None else call_form_of(kept["calls"])
    found = None if kept.get("reasoning") is None else reasoning_form_of(kept["reasoning"])
    reasoning = reasoning_by(tool_format, reasoning_format, found)
    if tool_format is not None:
        calls = calls_by(tool_format, form, name)
    controls = [each["content"] for each in tokenizer.get("added_tokens", ()) if each.get("special")]
    check_forms(calls, reasoning, controls, name)
    changed = {
        **kept,
        "calls": None if calls is None else calls.to_json(),
        "reasoning": None if reasoning is None else reasoning.to_json(),
    }
    return replace(files, contents={**files.contents, GOLDEN: json.dumps(changed).encode()})
