"""Reasoning in answers: read in pieces of any size, and counted in tokens of any size."""

from __future__ import annotations

import random

import pytest

from inferc.runtime.reasoning.reader import MAX_SPACES, ReasoningCount, ReasoningReader, State
from inferc.runtime.reasoning.reasoning import MARKS

OPENING, CLOSING = "<think>", "</think>"


def read(
    text: str, state: State, seed: int = 0, trail: str | None = None, is_cut: bool = False, largest: int = 9
) -> tuple[str, str]:
    """Read an answer in pieces of random sizes; return its reasoning and its text."""
    sizes = random.Random(seed)
    reader, thought, said = ReasoningReader(OPENING, CLOSING, state, trail), "", ""
    while text:
        size = sizes.randint(1, largest)
        more, then = reader.push(text[:size])
        assert not (more and said), "reasoning comes first"
        thought, said, text = thought + more, said + then, text[size:]
    more, then = reader.finish(is_cut)
    return thought + more, said + then


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("largest", [1, 9, 100])
@pytest.mark.parametrize(
    ("state", "text", "expected"),
    [
        ("begun", "\nHm,\n<b> \n so.\n</think>\n\n Yes </think> ", ("Hm,\n<b> \n so.", "Yes </think> ")),
        ("begun", "</think>Yes", ("", "Yes")),
        ("begun", " <think>a</think>b", ("<think>a", "b")),
        ("begun", "a</thin</think>b", ("a</thin", "b")),
        ("begun", "a</</think></think>", ("a</", "</think>")),
        ("begun", "a" + " " * 600 + "</think>b", ("a" + " " * (600 - MAX_SPACES), "b")),
        ("may_begin", "<think>\nHm\n</think>\n\nYes", ("Hm", "Yes")),
        ("may_begin", "\n\n<think>Hm</think>", ("Hm", "")),
        ("may_begin", " Yes <think>no</think>", ("", " Yes <think>no</think>")),
        ("may_begin", "<thin", ("", "<thin")),
        ("may_begin", "<thin>k", ("", "<thin>k")),
        ("may_begin", " " * 300 + "<think>", ("", " " * 300 + "<think>")),
        ("may_begin", " " * 300, ("", " " * 300)),
        ("may_begin", "", ("", "")),
        ("over", " <think>a</think>b", ("", " <think>a</think>b")),
    ],
)
def test_reasoning_is_what_stands_between_the_markers(
    state: State, text: str, expected: tuple[str, str], seed: int, largest: int
) -> None:
    assert read(text, state, seed, largest=largest) == expected


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("state", "text", "cut", "ended"),
    [
        ("begun", "Hm </thi", ("Hm", ""), ("Hm </thi", "")),
        ("begun", "Hm \n", ("Hm", ""), ("Hm", "")),
        ("begun", " \n", ("", ""), ("", "")),
        ("may_begin", " <thi", ("", ""), ("", " <thi")),
        ("may_begin", "<think>Hm", ("Hm", ""), ("Hm", "")),
        ("begun", "Hm</think>\n", ("Hm", ""), ("Hm", "")),
        ("begun", "Hm</think>\n\nY<", ("Hm", "Y<"), ("Hm", "Y<")),
    ],
)
def test_a_piece_of_a_marker_where_an_answer_is_cut_is_in_neither(
    state: State, text: str, cut: tuple[str, str], ended: tuple[str, str], seed: int
) -> None:
    assert read(text, state, seed, is_cut=True) == cut
    assert read(text, state, seed) == ended


@pytest.mark.parametrize("seed", range(6))
def test_what_a_form_begins_with_stays(seed: int) -> None:
    assert read("Hm\n</think>\n\n yes", "begun", seed, trail="\n\n") == ("Hm", " yes")
    assert read("Hm</think> yes", "begun", seed, trail="") == ("Hm", " yes")
    assert read("Hm</think>\nyes", "begun", seed, trail="\n\n") == ("Hm", "\nyes")
    assert read("Hm</think>\n", "begun", seed, trail="\n\n") == ("Hm", "")


def test_text_comes_as_soon_as_it_is_no_marker() -> None:
    reader = ReasoningReader(OPENING, CLOSING, "begun")
    assert [reader.push(each) for each in ("Hm", ", <", "b>", " ", "</th", "ink>", " ", "Yes ", "</")] == [
        ("Hm", ""),
        (",", ""),
        (" <b>", ""),
        ("", ""),
        ("", ""),
        ("", ""),
        ("", ""),
        ("", "Yes "),
        ("", "</"),
    ]
    reader = ReasoningReader(OPENING, CLOSING, "begun")
    assert reader.push("a")[0] and len(reader.push(" " * 2000)[0]) >= 2000 - MAX_SPACES - len(CLOSING)


def test_marks_that_end_nothing_are_shown_as_what_they_stand_for() -> None:
    begin, end = MARKS
    reader = ReasoningReader(begin, end, "begun", shown={begin: "<think>", end: ""})
    assert reader.push(f"a{begin}b</think>{end}c{begin}d{end}e") == ("a<think>b</think>", "c<think>de")


def count(tokens: list[str], state: State, cuts: int = 1) -> int:
    """Return the number of tokens of the reasoning; the answer comes in parts of `cuts` tokens."""
    counted = ReasoningCount(b"<think>", b"</think>", state, lambda token: tokens[token].encode())
    for start in range(0, len(tokens), cuts):
        counted.push(range(start, min(start + cuts, len(tokens))))
    return counted.count


@pytest.mark.parametrize("cuts", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("state", "tokens", "expected"),
    [
        ("begun", ["a", "b", "</think>", "c", "d"], 2),
        ("begun", ["</think>", "c"], 0),
        ("begun", ["a", "</", "think", ">", "c"], 1),
        ("begun", ["a", "b</", "thi", "nk>\n\n", "c"], 2),
        ("begun", ["a", "b", "</thi", "n"], 4),
        ("begun", ["a", "", "", "</think>"], 3),
        ("may_begin", ["\n", "<", "think>", "a", "b", "</think>", "c"], 2),
        ("may_begin", ["a", "<think>", "b"], 0),
        ("over", ["<think>", "a", "</think>"], 0),
    ],
)
def test_tokens_between_the_markers_are_counted(state: State, tokens: list[str], expected: int, cuts: int) -> None:
    assert count(tokens, state, cuts) == expected
