"""The reading of reasoning as a prompt leaves it, by tokens that are markers, or by the text of markers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from random_models import make_tokenizer
from thinking import MARKERS, MAY_BEGIN, PIECES, Kind, make_thinking

from inferc import RequestError, StructuredOutputs
from inferc.chat.reasoning import ReasoningForm
from inferc.runtime.grammar.vocabulary import Vocabulary
from inferc.runtime.reasoning.reader import State
from inferc.runtime.reasoning.reasoning import MARKS, Reasoning
from inferc.runtime.text.detokenizer import Detokenizer
from inferc.runtime.text.tokenizer import Text

FORM = ReasoningForm("<think>\n", "\n</think>\n\n")


@pytest.fixture(params=get_args(Kind))
def text(tmp_path: Path, request: pytest.FixtureRequest) -> Text:
    """A tokenizer whose markers are of each kind."""
    (tmp_path / "source").mkdir()
    make_tokenizer(tmp_path / "source")
    make_thinking(tmp_path / "source", tmp_path / "model", MAY_BEGIN, request.param)
    path = tmp_path / "model" / "golden_chat.json"
    path.write_text(json.dumps({"reasoning": FORM.to_json()}))
    found = Text(tmp_path / "model")
    assert found.reasoning_form == FORM
    return found


@pytest.mark.parametrize(
    ("prompt", "state"),
    [
        ("<|user|>hi<|assistant|>", "may_begin"),
        ("<|user|>hi<|assistant|><think>", "begun"),
        ("<|user|>hi<|assistant|><think>\n", "begun"),
        ("<|user|>hi<|assistant|><think>\n\n</think>\n\n", "over"),
        ("<|user|><think><|assistant|>", "may_begin"),
        ("</think>" + " a" * 100, "may_begin"),
        ("", "may_begin"),
    ],
)
def test_the_end_of_a_prompt_says_where_reasoning_is(text: Text, prompt: str, state: State) -> None:
    assert Reasoning.after(text, FORM, text.encode_rendered(prompt)).state == state


def test_tokens_that_are_markers_are_told_from_text(text: Text) -> None:
    reasoning, written = Reasoning(text, FORM, "may_begin"), "<think>\nHm</think>\n\nYes é"
    ids = text.encode_rendered(written)
    stream = Detokenizer(text, marks=reasoning.marks)
    found = "".join(stream.push([token]) for token in ids) + stream.finish()
    reader = reasoning.reader()
    assert reader.push(found) == ("Hm", "Yes é")
    spelled = text.encode_rendered("<think>Hm<") + text.encode_rendered("/think>Yes")
    stream, reader, count = Detokenizer(text, marks=reasoning.marks), reasoning.reader(), reasoning.count()
    count.push(spelled)
    if reasoning.marks:  # what the model spells is no marker
        assert reader.push(stream.push(spelled)) == ("Hm</think>Yes", "")
        assert count.count == len(spelled) - 1
    else:
        assert reader.push(stream.push(spelled)) == ("Hm", "Yes")


def test_half_a_character_before_a_marker_is_left_out(text: Text) -> None:
    reasoning = Reasoning(text, FORM, "begun")
    if not reasoning.marks:
        return
    half = text.encode_rendered("é")[:1]
    stream = Detokenizer(text, marks=reasoning.marks)
    end = next(token for token, mark in reasoning.marks.items() if mark == MARKS[1])
    assert stream.push([*half, end, *text.encode_rendered("a")]) == MARKS[1] + "a"


def test_markers_are_chosen_only_where_a_grammar_names_them(text: Text) -> None:
    tokens = Vocabulary.of(text, text.tokenizer.get_vocab_size(), (1,)).tokens
    for token, marker in text.reasoning_marks.items():
        assert tokens[token] == b"\xff" + marker.encode()
    if not text.reasoning_marks:
        assert {piece.encode() for piece in PIECES} <= set(tokens)
    assert {token for token in text.special_ids if tokens[token]} <= text.reasoning_marks.keys()


def test_forms_are_of_the_whole_answer(text: Text) -> None:
    wanted = StructuredOutputs(regex="a")
    for state in get_args(State):
        reasoning, found = Reasoning(text, FORM, state).held(wanted)
        assert found is not None and found.regex == "a"
        assert reasoning.is_held == (found.before is not None) == (state != "over")
        assert Reasoning(text, FORM, state).held(None)[1] is None
    before: Any = json.loads(Reasoning(text, FORM, "begun").held(wanted)[1].before or "")  # type: ignore[union-attr]
    free, end, trail = before["elements"]
    assert trail == {"type": "const_string", "value": "\n\n"}
    if text.reasoning_marks:
        assert free == {"type": "any_text"} and end["type"] == "token"
    else:
        assert free["excludes"] == [MARKERS[1]] and end["value"] == MARKERS[1]
        with pytest.raises(RequestError, match="max_reasoning_tokens: the model ends its reasoning with </think>"):
            Reasoning(text, FORM, "begun").held(wanted, 3)


def test_clients_cannot_say_what_comes_before_a_form() -> None:
    with pytest.raises(RequestError, match='it has no field "before"'):
        StructuredOutputs.of({"regex": "a", "before": "{}"})
