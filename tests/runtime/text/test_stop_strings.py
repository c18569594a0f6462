"""Stop strings are found where a search of the whole text finds them, at a cost independent of what is held back."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from inferc.errors import RequestError
from inferc.runtime.step.sampling_params import (
    MAX_ALL_STOP_CHARACTERS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    SamplingParams,
)
from inferc.runtime.text.stop_strings import Automaton, StopStrings


def oracle(stops: list[str], pieces: list[str], include: bool) -> tuple[list[str], str | None]:
    """Return what is shown after each piece, found by looking for every stop string at every place of the text."""
    text, shown = "", 0
    out: list[str] = []
    for piece in [*pieces, None]:
        text += piece or ""
        ends = [(start + len(stop), start, stop) for stop in stops for start in [text.find(stop)] if start >= 0]
        if ends:
            end, start, stop = min(ends)
            return [*out, text[shown : end if include else start]], stop
        until = len(text)
        if piece is not None:
            until = min(
                (at for at in range(len(text)) if any(stop.startswith(text[at:]) for stop in stops)), default=len(text)
            )
        out.append(text[shown:until])
        shown = until
    return out, None


def found(stops: list[str], pieces: list[str], include: bool) -> tuple[list[str], str | None]:
    finder, out = StopStrings(stops, include), []
    for piece in pieces:
        part, stop = finder.push(piece)
        out.append(part)
        if stop is not None:
            return out, stop
    return [*out, finder.finish()], None


TEXTS = st.text("ab\U0001f469", max_size=40)
STOPS = st.lists(st.text("ab\U0001f469", min_size=1, max_size=6), min_size=1, max_size=6)


@given(TEXTS, STOPS, st.lists(st.integers(0, 40)), st.booleans())
@example("aabab", ["aaa", "abab", "ab", "b"], [1, 2], False)
@example("abcabd", ["abcabe", "abd"], [3, 5], True)
@example("aaab", ["aab", "aaab"], [2], False)
@example("xyz", ["xyzw", "y"], [1, 2], False)
def test_what_is_shown_is_what_a_search_of_the_whole_text_shows(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    edges = sorted({0, len(text), *(at % (len(text) + 1) for at in cuts)})
    pieces = [text[a:b] for a, b in pairwise(edges)]
    assert found(stops, pieces, include) == oracle(stops, pieces, include)
    letters = list(text)
    assert found(stops, letters, include) == oracle(stops, letters, include)


class CountedSteps(Automaton):
    """Counts its looks for a child, which are what a character costs."""

    looks = 0

    def _child(self, node: int, char: int) -> int:
        self.looks += 1
        return super()._child(node, char)


@pytest.mark.parametrize("length", [500, 4_000, 32_000])
def test_a_character_costs_the_same_however_much_is_held_back(length: int) -> None:
    text = ("abcdefghij" * (length // 10 + 1))[:length]
    automaton = CountedSteps([f"{text}X{index}" for index in range(64)])
    automaton.looks = node = 0
    for char in map(ord, text * 3 + "q" + text):
        node = automaton.step(node, char)
    assert automaton.looks <= 2 * (4 * length + 1) + 1
    assert automaton.depths[node] == length


def test_many_long_stop_strings_are_refused_by_their_bounds() -> None:
    SamplingParams(stop=("a" * MAX_STOP_CHARACTERS,) * (MAX_ALL_STOP_CHARACTERS // MAX_STOP_CHARACTERS))
    for stops, message in (
        (("a" * 1025,), "stop: found a string of 1025 characters, at most 1024 are allowed; shorten it"),
        (("a" * 1000,) * 5, "stop: the strings have 5000 characters together, at most 4096 are allowed"),
        (("a",) * (MAX_STOP_STRINGS + 1), "stop: found 65 strings, at most 64 are allowed"),
    ):
        with pytest.raises(RequestError, match=message):
            SamplingParams(stop=stops)
