"""Forms that are sent to do harm: each costs its own request one clear line, and no answer beside it changes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from inferc import RequestError, SamplingParams
from inferc.config import GrammarBackend
from inferc.runtime.engine.engine import Engine
from inferc.runtime.engine.load import load_engine
from inferc.runtime.step.structured_outputs import StructuredOutputs

MANY = [f"value-{number}" for number in range(10_000)]


def within(begin: str, inner: str, end: str, depth: int) -> str:
    return begin * depth + inner + end * depth


def chained(count: int) -> str:
    """Return a Lark grammar of rules that each have the next: to compile it takes stack for all of them."""
    return "\n".join(["start: r0", *(f'r{each}:"a" r{each + 1}|"b"' for each in range(count)), f'r{count}:"c"'])


# What is sent, and what is said: by both libraries, or by xgrammar and by llguidance.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a schema of 1 MB": (
        {"json": json.dumps({"properties": {f"p{number}": {"title": "x" * 400} for number in range(2400)}})},
        r"it has \d+ bytes, at most 262144 are allowed; make it smaller",
    ),
    "a schema 10,000 levels deep": (
        {"json": within('{"items":', "{}", "}", 10_000)},
        "it is no JSON: maximum recursion depth exceeded",
    ),
    "a schema 100 levels deep": (
        {"json": within('{"items":', "{}", "}", 100)},
        "#: nests more than 64 objects and lists; ",
    ),
    "a reference to itself": (
        {"json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}},
        r"#/\$defs/a: refers to itself without end; put a property between",
    ),
    "a value that never ends": (
        {"json": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}},
        "#/properties/a: admits nothing: it never ends; allow some value",
    ),
    "10,000 values": ({"json": {"enum": MANY}}, "#: more than 2000 values of enum and const in all, of 64 KiB of text"),
    "10,000 choices": ({"choice": MANY}, "found 10000 texts, at most 2048 are allowed; give fewer"),
    "a pattern that repeats 100,000 times": (
        {"json": {"type": "string", "pattern": "^a{1,100000}$"}},
        "#/pattern: the pattern repeats more than 4096 times; repeat less, or without a bound",
    ),
    "patterns whose automata explode": (
        {"json": {"type": "string", "pattern": "(a|b)*a(a|b){14}$", "not": {"pattern": "^(a|b)*b(a|b){14}$"}}},
        "#/pattern: pattern, pattern are too intricate together; make it simpler, or leave part of it out",
    ),
    "an expression in 10,000 groups": (
        {"regex": within("(", "a", ")", 10_000)},
        "line 1, column 2008: Nest layer exceeded the maximum limit|exceed the maximum number of nested parentheses",
    ),
    "an expression of no text": (
        {"regex": r"[^\s\S]"},
        "it admits no answer, not even an empty one; see how it begins",
    ),
    "a grammar of no text": ({"grammar": 'root ::= root "a"'}, "it admits no answer, not even an empty one"),
    "bounds that exclude one another": (
        {"json": {"type": "integer", "minimum": 5, "maximum": 3}},
        "#: admits nothing: minimum 5 is more than maximum 3; allow some value",
    ),
    "a grammar in 10,000 groups": (
        {"grammar": "root ::= " + within("(", '"a"', ")", 10_000)},
        "line 1, column (1009: Nest layer exceeded the maximum limit|111: groups are within one another more than 100)",
    ),
    "a Lark grammar in 10,000 groups": (
        {"grammar": "start: " + within("(", '"a"', ")", 10_000)},
        r"(line 1, column 208: groups are nested deeper than 200 levels|1\(\d+\): lark grammar too deeply nested)",
    ),
    "a tag 5,000 levels deep": (
        {
            "structural_tag": '{"format":'
            + within('{"type":"optional","content":', '{"type":"any_text"}', "}", 5_000)
            + "}"
        },
        "it is no JSON: maximum recursion depth exceeded",
    ),
    "a tag 100 levels deep": (
        {
            "structural_tag": '{"format":'
            + within('{"type":"optional","content":', '{"type":"any_text"}', "}", 100)
            + "}"
        },
        "formats are within one another more than 32 times",
    ),
}
# What one library may refuse, for the time that it takes, and another hold to: answers go on or end by length.
HELD: dict[str, dict[str, Any]] = {
    "12,000 rules, each within the one before": {"grammar": chained(12_000)},
    "an expression that backtracks": {"regex": "(a+)+b"},
    "an expression that repeats 100,000 times": {"regex": "a{1,100000}"},
    "repetitions of repetitions": {"regex": "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"},
    "a thousand ways": {"regex": "(a|aa|aaa|a?a?a?){1,1000}b"},
    "a pattern of repetitions of repetitions": {"json": {"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"}},
    "4,000 rules, each within the one before": {"grammar": chained(4_000)},
    "4,900 properties": {"json": {"properties": {f"p{each}": {"type": "null"} for each in range(4_900)}}},
    "4,900 items, each with a place": {"json": {"type": "array", "prefixItems": [{"type": "null"}] * 4_900}},
    "a grammar that never ends": {"grammar": 'root ::= "a" root'},
    "an ambiguous grammar": {"grammar": 'root ::= root root | "a" | "b"'},
    "rules that double": {
        "grammar": "\n".join(
            [*(f"r{each} ::= r{each + 1} r{each + 1}" for each in range(60)), 'r60 ::= "a"', "root ::= r0"]
        )
    },
    "a tag with 1,000 begins": {
        "structural_tag": {
            "format": {
                "type": "triggered_tags",
                "triggers": ["a"],
                "tags": [
                    {
                        "type": "tag",
                        "begin": f"a{each};",
                        "content": {"type": "json_schema", "json_schema": {}},
                        "end": "b",
                    }
                    for each in range(1000)
                ],
            }
        }
    },
}
BESIDE = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(params=get_args(GrammarBackend), scope="module")
def engine(request: pytest.FixtureRequest, tiny_artifact: Path) -> Iterator[Engine]:
    made = load_engine(tiny_artifact, structured_outputs_backend=request.param, max_num_seqs=4, num_threads=1)
    yield made
    made.close()


def run(engine: Engine, form: dict[str, Any] | None) -> tuple[list[int], list[int], list[str]]:
    """Return the tokens of an answer without a form, those of one with it beside, and what was said about the form."""
    found: dict[str, list[int]] = {"beside": [], "form": []}
    said: list[str] = []
    engine.add_request("beside", [5, 6, 7], BESIDE)
    if form is not None:
        try:
            params = SamplingParams(temperature=0, max_tokens=8, structured_outputs=StructuredOutputs.of(form))
            engine.add_request("form", [5, 6, 8], params)
        except RequestError as error:
            said.append(str(error))
    while engine.has_work:
        if engine.grammars.has_parked:
            engine.grammars.begin_ready(0.01)
        for output in engine.step():
            found[output.request_id] += output.token_ids
        said += [why for _, why in engine.grammars.take_invalid()]
    return found["beside"], found["form"], said


@pytest.fixture(scope="module")
def alone(engine: Engine) -> list[int]:
    tokens, _, said = run(engine, None)
    assert len(tokens) == 24 and not said
    return tokens


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_held_to_is_refused_in_a_line(engine: Engine, alone: list[int], name: str) -> None:
    form, message = REFUSED[name]
    beside, tokens, said = run(engine, form)
    assert beside == alone and not tokens
    assert len(said) == 1 and "\n" not in said[0] and len(said[0]) < 400
    label = f"structured_outputs.{next(iter(form))}: "
    assert said[0].startswith(label)
    assert re.search(message, said[0]), said[0]


@pytest.mark.parametrize("name", HELD)
def test_what_is_intricate_is_held_to_or_refused_in_a_line(engine: Engine, alone: list[int], name: str) -> None:
    beside, tokens, said = run(engine, HELD[name])
    assert beside == alone
    if said:
        assert len(said) == 1 and not tokens and said[0].endswith("; make it smaller")
    else:
        assert tokens
