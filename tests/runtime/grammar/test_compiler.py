"""Grammars compiled in processes beside the engine: once each, bounded, and none in another's way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import psutil
import pytest

from inferc import RequestError, StructuredOutputs
from inferc.runtime.grammar import compiler as compiler_module
from inferc.runtime.grammar.compiler import GrammarCompiler
from inferc.runtime.grammar.llguidance import LlguidanceGrammar
from inferc.runtime.grammar.vocabulary import Vocabulary
from inferc.system.worker_process import WorkerLimits

VOCABULARY = Vocabulary((*(bytes([byte]) for byte in range(256)), b""), (256,))


def words(count: int) -> StructuredOutputs:
    return StructuredOutputs(grammar="root ::= " + " | ".join(f'"v{number}"' for number in range(count)))


SLOW = words(20_000)  # seconds, on a fast machine


def make(seconds: float = 20.0) -> GrammarCompiler:
    return GrammarCompiler(lambda: VOCABULARY, limits=WorkerLimits(seconds, 2 << 30))


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    made = make()
    yield made
    made.close()


def test_a_form_is_compiled_once(compiler: GrammarCompiler) -> None:
    form = StructuredOutputs(regex="a+", label="guided_regex")
    first = compiler.compile(form)
    assert first.result(60).matcher().accept(ord("a"))
    assert compiler.compile(StructuredOutputs(regex="a+")) is first
    assert compiler.compile(StructuredOutputs(regex="b+")) is not first
    assert first.result().matcher().accept(ord("a")), "places in it are independent"


def test_the_backend_that_is_asked_for_compiles() -> None:
    made = GrammarCompiler(lambda: VOCABULARY, "llguidance", WorkerLimits(20.0, 2 << 30))
    try:
        assert isinstance(made.compile(StructuredOutputs(regex="a+")).result(60), LlguidanceGrammar)
        with pytest.raises(RequestError, match="unclosed group"):
            made.compile(StructuredOutputs(regex="(a")).result(60)
    finally:
        made.close()


def test_a_form_that_is_refused_is_not_kept(compiler: GrammarCompiler) -> None:
    form = StructuredOutputs(regex="(a")
    with pytest.raises(RequestError, match="parenthesis is not closed"):
        compiler.compile(form).result(60)
    assert not compiler._grammars
    with pytest.raises(RequestError):
        compiler.compile(form).result(60)


def test_grammars_that_were_not_used_lately_go(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "KEPT_BYTES", 0)
    forms = [StructuredOutputs(regex=letter) for letter in "abc"]
    for form in forms:
        compiler.compile(form).result(60)
        # Once all threads meet, none is in a callback any more.
        barrier = threading.Barrier(compiler_module.AT_ONCE)
        wait([compiler._pool.submit(barrier.wait) for _ in range(compiler_module.AT_ONCE)])
    assert list(compiler._grammars) == [forms[-1]]


def test_one_that_takes_too_long_costs_its_process_alone() -> None:
    compiler = make(0.8)
    try:
        assert compiler.compile(StructuredOutputs(regex="a")).result(60)
        slow = compiler.compile(SLOW)
        with pytest.raises(RequestError, match=r"compiling it takes more than 0.8 s; make it smaller"):
            slow.result(60)
        assert compiler.compile(StructuredOutputs(regex="b")).result(60)
    finally:
        compiler.close()
    assert all(process.pid is None for process in compiler._processes)


def test_one_that_takes_too_much_stack_costs_its_process_alone() -> None:
    rules = [f'r{each}:"a" r{each + 1}|"b"' for each in range(12_000)]  # each is compiled within the one before
    made = GrammarCompiler(lambda: VOCABULARY, "llguidance", WorkerLimits(20.0, 2 << 30))
    try:
        with pytest.raises(RequestError, match=r"compiling it failed: its process ended with SIGSEGV; make it smaller"):
            made.compile(StructuredOutputs(grammar="\n".join(["start: r0", *rules, 'r12000:"c"']))).result(60)
        assert made.compile(StructuredOutputs(regex="b")).result(60)
    finally:
        made.close()


def test_a_slow_one_holds_up_no_other(compiler: GrammarCompiler) -> None:
    slow, quick = compiler.compile(words(2_000)), compiler.compile(StructuredOutputs(regex="a"))
    assert quick.result(60) and slow.result(60)
    assert len(compiler._processes) == 2


def test_processes_end_with_the_compiler(compiler: GrammarCompiler) -> None:
    compiler.compile(StructuredOutputs(regex="a")).result(60)
    (process,) = [psutil.Process(each.pid) for each in compiler._processes]
    assert process.nice() == min(psutil.Process().nice() + 5, 19)
    compiler.close()
    assert not process.is_running()


def test_no_process_starts_before_a_form_is_asked_for() -> None:
    def fails() -> Vocabulary:
        raise RequestError("there is no tokenizer")

    compiler = GrammarCompiler(fails)
    assert not compiler._processes
    with pytest.raises(RequestError, match="there is no tokenizer"):
        compiler.compile(StructuredOutputs(regex="a")).result(60)
    compiler.close()


def test_the_vocabulary_is_that_of_the_text(tiny_artifact: Path) -> None:
    from inferc.runtime.artifact.load import load_artifact
    from inferc.runtime.text.tokenizer import Text

    artifact = load_artifact(tiny_artifact)
    text = Text(artifact.tokenizer)
    vocabulary = Vocabulary.of(text, artifact.vocab_size, (0,))
    assert len(vocabulary.tokens) == artifact.vocab_size and vocabulary.end_ids == (0,)
    assert all(vocabulary.tokens[token] == b"" for token in (0, *text.special_ids))
    words = text.encode('{"é": 東京}', add_special_tokens=False)
    assert b"".join(vocabulary.tokens[token] for token in words).decode() == '{"é": 東京}'
