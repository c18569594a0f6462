"""Models that reason: random ones, whose tokenizers and chat templates have markers of reasoning."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rendering import EACH, END

MARKERS = ("<think>", "</think>")
PIECES = ("</thi", "nk>")
# What the markers are to a tokenizer: tokens of text, control tokens, or texts of several tokens (PIECES).
Kind = Literal["token", "control", "text"]

SWITCH = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
TOOLS = "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}"
CALLS = (
    "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}={{ call.function.arguments | tojson }}</call>"
    "{% endfor %}"
)
ANSWERS = (
    TOOLS
    + EACH
    + "<|{{ m.role }}|>{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    + "{{ m.content or '' }}"
    + CALLS
    + END
)
MAY_BEGIN = ANSWERS + "{% if add_generation_prompt %}<|assistant|>" + SWITCH + "{% endif %}"
BEGUN = ANSWERS + "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"


def make_thinking(source: Path, folder: Path, template: str, kind: Kind) -> dict[str, int]:
    """Copy a model folder with another chat template, whose markers are of this kind; return their ids, or of PIECES.

    The tokenizer's last merges give their ids to them, so that the model has as many tokens as before.
    """
    shutil.copytree(source, folder)
    (folder / "chat_template.jinja").write_text(template)
    return add_tokens(folder, PIECES if kind == "text" else MARKERS, kind)


def add_tokens(folder: Path, names: Sequence[str], kind: Kind) -> dict[str, int]:
    """Give the ids of a tokenizer's last merges to new tokens, which are returned."""
    path = folder / "tokenizer.json"
    definition = json.loads(path.read_text())
    model, found = definition["model"], {}
    for name in names:
        last = max(model["vocab"], key=model["vocab"].__getitem__)
        found[name] = model["vocab"].pop(last)
        model["merges"] = [pair for pair in model["merges"] if "".join(pair) != last]
    if kind == "text":
        model["vocab"].update(found)
    for name, token in [] if kind == "text" else sorted(found.items(), key=lambda item: item[1]):
        definition["added_tokens"].append(
            {
                "id": token,
                "content": name,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind == "control",
            }
        )
    path.write_text(json.dumps(definition))
    return found
