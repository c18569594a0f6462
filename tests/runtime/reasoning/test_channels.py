"""Answers in channels: read in pieces of any size, counted, and read as what the grammar of the same form admits."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
from harmony import TOKENS
from schema_walks import MARKS, Walker, tokens_of

from inferc import StructuredOutputs
from inferc.chat.channels import HARMONY
from inferc.config import GrammarBackend
from inferc.runtime.reasoning.channels import ChannelCount, ChannelMarks, ChannelReader
from inferc.runtime.reasoning.reader import State
from inferc.runtime.tools.answer_calls import AnswerCalls
from inferc.runtime.tools.call_reader import Said, read_calls
from inferc.runtime.tools.tools import Tools

CHANNELS = ChannelMarks(HARMONY, dict(zip(TOKENS, MARKS, strict=False)))
OF_WALKS = {MARKS[token]: mark for token, mark in CHANNELS.by_token.items()}
FUNCTIONS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
    "now": {"name": "now"},
}
SCHEMAS = {
    "get_weather": FUNCTIONS["get_weather"]["parameters"],
    "now": {"type": "object", "additionalProperties": False},
}
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
LONG = "a header that does not end " * 40
HEADERS = (
    "<|channel|>commentary to=functions.now <|constrain|>json<|message|>",
    " to=functions.now<|channel|>commentary <|constrain|>json<|message|>",
    " to=functions.now<|channel|>commentary json<|message|>",
    "<|channel|>commentary to=functions.now json<|message|>",
)


def marked(text: str, marks: dict[str, str] | None = None) -> str:
    """Return a text that names control tokens with their marks."""
    of_names = {name: CHANNELS.by_token[token] for name, token in CHANNELS.ids.items()} if marks is None else marks
    for name, mark in of_names.items():
        text = text.replace(name, mark)
    return text


def calls_of() -> AnswerCalls:
    names = {name: MARKS[token] for name, token in CHANNELS.ids.items()}
    form = HARMONY.call_form
    found = replace(form, before=marked(form.before, names), between=marked(form.between, names))
    used = found.before + found.between
    return AnswerCalls(found, FUNCTIONS, {token: mark for token, mark in MARKS.items() if mark in used}, CHANNELS)


def read(text: str, seed: int = 0, tail: str = "assistant", is_within: bool = False) -> tuple[str, Said]:
    """Read an answer in pieces of random sizes; return its reasoning, and its text and calls."""
    sizes, calls = random.Random(seed), calls_of()
    reader = ChannelReader(CHANNELS, marked(tail), calls.begun, is_within)
    thoughts, said, left = "", "", marked(text)
    while left:
        size = sizes.choice((1, 1, 2, 5, 30))
        more, part = reader.push(left[:size])
        thoughts, said, left = thoughts + more, said + part, left[size:]
    more, part = reader.finish()
    return thoughts + more, read_calls(calls, said + part)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("answer", "thoughts", "text", "names"),
    [
        (f"{ANALYSIS}Hm.{NEXT}{FINAL}Yes.", "Hm.", "Yes.", []),
        (f"{ANALYSIS} Hm.\n {NEXT}{FINAL}Yes. <|return|>", "Hm.", "Yes. ", []),
        (f"{ANALYSIS}Hm.{NEXT}{FINAL}    return 1\n", "Hm.", "    return 1\n", []),
        (f"{ANALYSIS}Hm.{NEXT}{ANALYSIS}Hm?{NEXT}{FINAL}Yes.", "Hm.\n\nHm?", "Yes.", []),
        (f"{FINAL}Yes.", "", "Yes.", []),
        (f"{ANALYSIS}Hm", "Hm", "", []),
        *[(f"{ANALYSIS}Hm.{NEXT}{header}{{}}<|call|>", "Hm.", "", ["now"]) for header in HEADERS],
        (f"<|channel|>commentary<|message|>I look.{NEXT}{HEADERS[0]}{{}}", "", "I look.", ["now"]),
        (f"<|channel|>commentary<|message|>One.{NEXT}{FINAL}Two.", "", "One.\n\nTwo.", []),
        (f"{HEADERS[0]}{{}}<|call|><|start|>assistant{HEADERS[2]}{{}}<|call|>", "", "", ["now", "now"]),
        (f"<|channel|>comment<|message|>Said.{NEXT}{FINAL}Two.", "", "Said.\n\nTwo.", []),
        ("Hello there.", "", "Hello there.", []),
        (" ", "", " ", []),
        ("<|channel|>fin", "", "", []),
        (f"<|channel|>{LONG}<|end|>", "", LONG, []),
        ("as it is", "", "as it is", []),
        ("a", "", "a", []),
        (f"{ANALYSIS}a <|constrain|>b{NEXT}", "a b", "", []),
        (f"{FINAL}<think> {{}} analysis", "", "<think> {} analysis", []),
    ],
)
def test_reasoning_texts_and_calls_are_told_apart(
    answer: str, thoughts: str, text: str, names: list[str], seed: int
) -> None:
    found, said = read(answer, seed)
    assert (found, said.text, [call.name for call in said.calls]) == (thoughts, text, names)
    assert all(call.arguments == "{}" for call in said.calls)


def test_reasoning_may_stay_within_the_text() -> None:
    assert read(f"{ANALYSIS}Hm.{NEXT}{FINAL}Yes.", is_within=True)[1].text == "Hm.\n\nYes."


@pytest.mark.parametrize(
    ("tail", "answer", "state", "expected"),
    [
        ("assistant", f"{FINAL}a", "may_begin", ("", "a")),
        (f"assistant{ANALYSIS}So", f" then.{NEXT}{FINAL}a", "begun", (" then.", "a")),
        (f"assistant{FINAL}So", " then.", "over", ("", " then.")),
        ("assistant<|channel|>fi", "nal<|message|>a", "over", ("", "a")),
    ],
)
def test_an_answer_goes_on_where_its_prompt_ends(
    tail: str, answer: str, state: State, expected: tuple[str, str]
) -> None:
    thoughts, said = read(answer, tail=tail)
    assert (thoughts, said.text) == expected
    assert ChannelCount(CHANNELS, tokens(tail), spelled).state == state


def tokens(text: str) -> list[int]:
    """Return the tokens of a text: its bytes, and the control tokens that it names."""
    ids = {CHANNELS.by_token[token]: token for token in CHANNELS.ids.values()}
    return [token for char in marked(text) for token in ([ids[char]] if char in ids else char.encode())]


def spelled(token: int) -> bytes:
    return bytes([token]) if token < 256 else b""


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_tokens_of_reasoning_are_counted(size: int) -> None:
    before = f"{ANALYSIS}Hm.{NEXT}{ANALYSIS}é{NEXT}"
    answer = tokens(f"{before}{FINAL}Yes.")
    count = ChannelCount(CHANNELS, tokens("assistant"), spelled)
    for start in range(0, len(answer), size):
        count.push(answer[start : start + size])
    assert count.count == 5 and count.is_over and count.num_before == len(tokens(before + FINAL))
    plain = ChannelCount(CHANNELS, tokens("assistant"), spelled)
    plain.push(tokens("Hello"))
    assert (plain.count, plain.num_before, plain.is_over) == (0, 0, True)


def held(wanted: StructuredOutputs, state: State = "may_begin", max_tokens: int | None = None) -> StructuredOutputs:
    before = CHANNELS.before(state, max_tokens, wanted.has_headers)
    return replace(wanted, before=json.dumps(before))


def in_walks(text: str) -> str:
    """Return a text that names control tokens with the marks that walks have for them."""
    return marked(text, {name: MARKS[token] for name, token in CHANNELS.ids.items()})


def admits(walker: Walker, text: str) -> bool:
    return walker.admits(in_walks(text))


LIBRARIES: tuple[GrammarBackend, ...] = ("xgrammar", "llguidance")
TOOLS = {
    "auto": Tools(FUNCTIONS),
    "required": Tools(FUNCTIONS, "required"),
    "none": Tools(FUNCTIONS, "none"),
    "named": Tools(FUNCTIONS, "required", "now"),
}
TRIES = [
    in_walks(each) for each in (ANALYSIS, NEXT, FINAL, *HEADERS, HEADERS[0].replace("now", "get_weather"), '{"city": "')
]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("choice", TOOLS)
def test_what_may_be_written_is_read(choice: str, library: GrammarBackend) -> None:
    tools = TOOLS[choice]
    walker = Walker(held(tools.held_to(calls_of())), library, has_controls=True, tries=TRIES)
    seen = set()
    for seed in range(40):
        if (answer := walker.document(seed)) is None:
            continue
        written = answer.translate({ord(each): mark for each, mark in OF_WALKS.items()})
        assert not {ord(char) for char in written} & {ord(mark) for mark in MARKS.values()}
        reader = ChannelReader(CHANNELS, "assistant", calls_of().begun)
        parts = [reader.push(written), reader.finish()]
        thoughts, said = "".join(part[0] for part in parts), read_calls(calls_of(), "".join(part[1] for part in parts))
        assert not any(mark in thoughts + said.text for mark in (*MARKS.values(), *OF_WALKS.values()))
        assert len(said.calls) == (1 if choice in ("required", "named") else len(said.calls) if choice == "auto" else 0)
        assert len(said.calls) <= 1 and not said.is_cut and (not said.text or choice in ("auto", "none"))
        for call in said.calls:
            assert choice != "named" or call.name == "now"
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        seen.add((bool(thoughts), len(said.calls)))
    assert len(seen) > 1


@pytest.mark.parametrize("library", LIBRARIES)
def test_calls_are_of_the_tools_and_under_their_schemas(library: GrammarBackend) -> None:
    walker = Walker(held(TOOLS["auto"].held_to(calls_of())), library, has_controls=True)
    for header in HEADERS:
        assert admits(walker, f"{ANALYSIS}Hm.{NEXT}{header}{{}}")
        assert not admits(walker, header + '{"a": 1}') and not admits(walker, header + "{}" + NEXT + FINAL + "a")
    assert admits(walker, f"{ANALYSIS}Hm.{NEXT}{FINAL}Yes.")
    assert admits(walker, f"<|channel|>commentary<|message|>I look.{NEXT}{HEADERS[1]}{{}}")
    assert not admits(walker, HEADERS[0].replace("now", "other") + "{}")
    assert not admits(walker, "Yes.") and not admits(walker, f"{ANALYSIS}Hm.")
    walker = Walker(held(TOOLS["required"].held_to(calls_of())), library, has_controls=True)
    assert admits(walker, HEADERS[0] + "{}") and not admits(walker, FINAL + "Yes.")
    walker = Walker(held(TOOLS["none"].held_to(calls_of())), library, has_controls=True)
    assert admits(walker, FINAL + "Yes.") and not admits(walker, HEADERS[0] + "{}")


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_form_holds_the_text_alone(library: GrammarBackend) -> None:
    wanted = StructuredOutputs(json='{"enum": ["a"]}')
    walker = Walker(held(wanted), library, has_controls=True)
    json_final = "<|channel|>final <|constrain|>json<|message|>"
    for text in (f'{FINAL}"a"', f'{ANALYSIS}"b"{NEXT}{FINAL}"a"', f'{json_final}"a"'):
        assert admits(walker, text) and read(text)[1].text == '"a"'
    for text in ('"a"', f'{FINAL}"b"', f'{ANALYSIS}"a"', f'<|channel|>commentary<|message|>"a"{NEXT}{FINAL}"a"'):
        assert not admits(walker, text)
    begun = Walker(held(wanted, "begun"), library, has_controls=True)
    assert admits(begun, f'b{NEXT}{FINAL}"a"') and not admits(begun, f'{FINAL}"a"')


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_answer_is_a_call_or_of_a_form(library: GrammarBackend) -> None:
    wanted = StructuredOutputs(json='{"enum": ["a"]}')
    walker = Walker(held(TOOLS["auto"].held_to(calls_of(), wanted)), library, has_controls=True)
    for text in (f'{FINAL}"a"', f'{ANALYSIS}b{NEXT}<|channel|>final json<|message|>"a"', HEADERS[0] + "{}"):
        assert admits(walker, text) and bool(read(text)[1].calls) == text.endswith("}")
    for text in (f"{FINAL}b", f"<|channel|>commentary<|message|>b{NEXT}{HEADERS[0]}{{}}", HEADERS[0] + '"a"'):
        assert not admits(walker, text)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("state", ["may_begin", "begun"])
def test_reasoning_ends_by_its_limit(library: GrammarBackend, state: State) -> None:
    walker = Walker(held(StructuredOutputs(regex="a"), state, 3), library, has_controls=True)
    matcher = walker.grammar.matcher()
    begun = tokens_of(in_walks(ANALYSIS if state == "may_begin" else ""))
    for token in (*begun, *b"abc"):
        matcher.fill(walker.bits, 0)
        assert matcher.accept(token)
    matcher.fill(walker.bits, 0)
    bits = np.unpackbits(walker.bits.view(np.uint8), bitorder="little")[: walker.size]
    assert np.flatnonzero(bits).tolist() == tokens_of(in_walks("<|end|>"))
    rest = f"{NEXT}{FINAL}a"
    head = ANALYSIS if state == "may_begin" else ""
    assert admits(walker, f"{head}a{rest}") and not admits(walker, f"{head}a{NEXT}{ANALYSIS}a{rest}"), "it is over"
