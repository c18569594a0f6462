"""The tokens of a conversation's next turns: what a template writes behind the messages whose tokens are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rendering import EACH, END

from inferc.errors import RequestError
from inferc.frontend.checkpoint.load import load
from inferc.frontend.text.text_files import tokenizer_files
from inferc.runtime.text.control_tokens import CHOICES
from inferc.runtime.text.tokenizer import Text
from inferc.runtime.text.turns import REWRITES, Known, render_behind

MODEL = Path(__file__).parents[3] / "examples" / "models" / "tiny-llama"
MARK = "zqmark"
SAID = [("system", " short "), ("user", "hi"), ("assistant", MARK), ("user", "<|end|> more"), ("assistant", MARK)]
MESSAGES: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in SAID]
# Trims what is said, and writes reasoning behind the last thing that a user said.
THINKS = (
    EACH
    + "<|{{ m.role }}|>{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    + "{{ m.content | trim }}<|end|>"
    + END
    + "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
COUNTS = "{{ messages | length }}" + EACH + "{{ m.content }}" + END


def text_of(folder: Path, template: str | None = None, in_text: Any = "allow") -> Text:
    for name, data in tokenizer_files(load(MODEL)).items():
        if template is None or name == "tokenizer.json":
            (folder / name).write_bytes(data)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return Text(folder, in_text)


def pieces(text: Text, messages: list[dict[str, Any]]) -> list[str]:
    """Return the parts that a program appends turn by turn: each beginning of an answer, and each end."""
    found = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            found.append(render_behind(text, messages[:index], Known(index, MARK)))
        found.append(render_behind(text, messages[: index + 1], Known(index, MARK), add_generation_prompt=False))
    return found


@pytest.mark.parametrize("in_text", CHOICES)
def test_turns_are_what_the_whole_conversation_has(tmp_path: Path, in_text: Any) -> None:
    text = text_of(tmp_path, in_text=in_text)
    messages = MESSAGES if in_text != "refuse" else MESSAGES[:3]
    whole = text.render_chat(messages, add_generation_prompt=False)
    found = pieces(text, messages)
    assert "".join(piece + MARK * piece.endswith("<|assistant|>\n") for piece in found) == whole
    text.close()


def test_what_a_template_does_with_answers_changes_nothing(tmp_path: Path) -> None:
    text = text_of(tmp_path, THINKS)
    assert pieces(text, MESSAGES) == [
        "<|system|>short<|end|>",
        "<|user|>hi<|end|>",
        "<|assistant|>",
        "<|end|>",
        "<|user|><|end|> more<|end|>",
        "<|assistant|>",
        "<|end|>",
    ]
    text.close()


def test_a_template_that_changes_what_it_wrote(tmp_path: Path) -> None:
    text = text_of(tmp_path, COUNTS)
    with pytest.raises(RequestError) as raised:
        render_behind(text, MESSAGES[:2], Known(1, MARK))
    assert str(raised.value) == REWRITES
    for count in (-1, 3):
        with pytest.raises(RequestError, match=f"num_known is {count}; expected 0 to 2, the number of messages"):
            render_behind(text, MESSAGES[:2], Known(count, MARK))
    text.close()
