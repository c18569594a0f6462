"""The reasoning of choices, told from their deltas: calls that it names are none, in chunks and in whole answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from random_models import make_tokenizer
from thinking import BEGUN, make_thinking

from inferc.chat.calls import CallForm
from inferc.chat.reasoning import ReasoningForm
from inferc.runtime.openai.reasoning import Shown
from inferc.runtime.openai.request import CHAT, parse_request
from inferc.runtime.reasoning.reasoning import Reasoning
from inferc.runtime.text.tokenizer import Text
from inferc.runtime.tools.answer_calls import AnswerCalls
from inferc.serve.answering.answering import Growing
from inferc.serve.answering.logprobs_json import PromptJson
from inferc.serve.answering.reasoning import ReasoningApart
from inferc.serve.http.openai_chunks import Chunks
from inferc.serve.models.streams import Delta

CALLS = AnswerCalls(CallForm("<call>", "=", "</call>"))
FORM = ReasoningForm("<think>\n", "\n</think>\n\n", is_begun=True)
BODY = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


@pytest.fixture
def text(tmp_path: Path) -> Text:
    (tmp_path / "source").mkdir()
    make_tokenizer(tmp_path / "source")
    make_thinking(tmp_path / "source", tmp_path / "model", BEGUN, "text")
    return Text(tmp_path / "model")


def deltas(text: Text, said: str, index: int = 0) -> list[Delta]:
    """Return a choice's deltas, of a token each."""
    ids = text.encode(said)
    found = [Delta(index, text.decode([token]), [token], None, []) for token in ids]
    return [*found, Delta(index, "", [], "stop", [])]


@pytest.mark.parametrize("shown", ["apart", "left_out", "in_text"])
def test_calls_that_reasoning_names_are_none(text: Text, shown: Shown) -> None:
    request = parse_request(CHAT, BODY, is_served=True)
    apart = ReasoningApart(Reasoning(text, FORM, "begun"), shown)
    chunks = Chunks(request, {"id": "a"}, lambda token: ("", None), CALLS)
    whole, sent = Growing(0), b""
    for delta in deltas(text, 'I could <call>look={"a": 1}</call>.\n</think>\n\nI <call>find={}</call>'):
        told = apart.of(0, delta)
        whole.add(told)
        sent += chunks.of(0, told, PromptJson(0))
    parts: list[Any] = [json.loads(each)["choices"][0] for each in sent.decode().split("data: ")[1:]]
    names = [call["function"].get("name") for part in parts for call in part["delta"].get("tool_calls", ())]
    said = "".join(part["delta"].get("content") or "" for part in parts)
    thought = "".join(part["delta"].get("reasoning", "") for part in parts)
    if shown == "in_text":
        assert names[0] == "look" and "find" in names
        return
    assert [name for name in names if name] == ["find"] and said == "I"
    assert thought == whole.reasoning == ('I could <call>look={"a": 1}</call>.' if shown == "apart" else "")
    assert whole.so_far().text == "I <call>find={}</call>"
    assert parts[-1]["finish_reason"] == "tool_calls" and {part["finish_reason"] for part in parts[:-1]} == {None}


def test_choices_are_told_apart(text: Text) -> None:
    apart = ReasoningApart(Reasoning(text, FORM, "begun"), "apart")
    first, second = deltas(text, "ab</think>c"), deltas(text, "d</think>e", 1)
    found = {0: Growing(0), 1: Growing(1)}
    for index, delta in (
        (0, first[0]),
        (1, second[0]),
        *((0, each) for each in first[1:]),
        *((1, each) for each in second[1:]),
    ):
        found[index].add(apart.of(index, delta))
    assert [(each.reasoning, each.so_far().text) for each in found.values()] == [("ab", "c"), ("d", "e")]
    assert apart.num_tokens == len(text.encode("ab")) + len(text.encode("d"))
