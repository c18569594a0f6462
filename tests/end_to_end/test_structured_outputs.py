"""Answers held to a form, on a compiled artifact: they have it, and their tokens do not depend on what else runs."""

from __future__ import annotations

import json
import queue
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inferc import LLM, RequestError, SamplingParams, StructuredOutputs
from inferc.arena import mask_words
from inferc.compiler.build import compile
from inferc.config import CompileConfig
from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.engine.load import load_engine, model_limits
from inferc.runtime.grammar.backend import open_backend
from inferc.runtime.grammar.compiler import GrammarCompiler
from inferc.runtime.grammar.grammars import Grammars
from inferc.runtime.grammar.vocabulary import Vocabulary
from inferc.runtime.text.tokenizer import Text

PROMPTS = ["def add(first", "for name in", "The quick brown fox jumps over", "Café 東京 🙂"]
BLOCK_BYTES = 32 * 2 * 2 * 2 * 16 * 4  # tokens, layers, K and V, KV heads, head_dim, float32
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 3},
        "kind": {"enum": ["small", "large"]},
    },
    "required": ["name", "kind"],
}
FORMS: dict[str, dict[str, Any]] = {
    "schema": {"json": SCHEMA, "disable_any_whitespace": True},
    "regex": {"regex": r"[a-z]{30,40}-\d{4}"},
    "choice": {"choice": ["yes", "no", "perhaps, if it rains"]},
    "grammar": {"grammar": 'root ::= "(" root ")" | [a-f]{20,30}'},
}
HOW: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "seeded": {"temperature": 1.5, "seed": 7}}


def params_of(form: str, how: str, **others: Any) -> SamplingParams:
    return SamplingParams(max_tokens=64, structured_outputs=StructuredOutputs.of(FORMS[form]), **HOW[how], **others)


@pytest.fixture(scope="module")
def llm(tiny_artifact: Path) -> Iterator[LLM]:
    with LLM(tiny_artifact, max_num_seqs=16, num_threads=1) as made:
        yield made


@pytest.fixture(scope="module")
def alone(llm: LLM) -> dict[tuple[str, str, str], list[int]]:
    """The ids of each answer, generated one after the other; "free" answers have no form."""
    found = {}
    for prompt in PROMPTS:
        for how, sampling in HOW.items():
            for form in FORMS:
                found[prompt, form, how] = ids(llm.generate(prompt, params_of(form, how)))[0]
            free = SamplingParams(max_tokens=64, ignore_eos=True, **sampling)
            found[prompt, "free", how] = ids(llm.generate(prompt, free))[0]
    return found


def ids(answers: list[Any]) -> list[list[int]]:
    return [answer.outputs[0].token_ids for answer in answers]


def has_form(form: str, text: str) -> bool:
    if form == "schema":
        value = json.loads(text)
        kinds = {"name": str, "tags": list, "kind": str}
        return all(type(value[name]) is kinds[name] for name in value) and value["kind"] in ("small", "large")
    if form == "choice":
        return text in FORMS["choice"]["choice"]
    if form == "regex":
        return re.fullmatch(FORMS["regex"]["regex"], text) is not None
    inner = text.strip("()")
    return re.fullmatch("[a-f]{20,30}", inner) is not None and text.count("(") == text.count(")")


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("form", FORMS)
def test_answers_have_their_form_and_end_with_it(llm: LLM, form: str, how: str) -> None:
    ended = 0
    for answer in llm.generate(PROMPTS, params_of(form, how)):
        output = answer.outputs[0]
        if output.finish_reason == "stop":
            ended += 1
            assert has_form(form, output.text), output.text
            assert output.token_ids[-1] in model_ends(llm)
    assert ended or form == "grammar", "parentheses may be opened for ever"


def model_ends(llm: LLM) -> tuple[int, ...]:
    return llm._client._engine.model.eos_token_ids


@pytest.mark.parametrize("form", FORMS)
def test_the_tokens_are_those_of_a_choice_step_by_step(
    tiny_artifact: Path, llm: LLM, alone: dict[tuple[str, str, str], list[int]], form: str
) -> None:
    """Another way to them: each token in a request of its own, which lists the ids that the grammar allows there."""
    artifact = load_artifact(tiny_artifact)
    backend = open_backend(Vocabulary.of(Text(artifact.tokenizer), artifact.vocab_size, model_ends(llm)))
    wanted = StructuredOutputs.of(FORMS[form])
    assert wanted is not None
    matcher = backend.load(backend.compile(wanted)).matcher()
    bits = np.zeros((1, mask_words(artifact.vocab_size)), np.uint32)
    text, found = llm.text.encode(PROMPTS[0]), list[int]()
    while not matcher.is_ended and len(found) < 64:
        matcher.fill(bits, 0)
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[: artifact.vocab_size])
        step = SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=tuple(allowed.tolist()))
        (token,) = ids(llm.generate([text + found], step))[0]
        assert matcher.accept(token)
        found.append(token)
    assert found == alone[PROMPTS[0], form, "greedy"]


def test_both_libraries_choose_the_same_tokens(
    tiny_artifact: Path, alone: dict[tuple[str, str, str], list[int]]
) -> None:
    with LLM(tiny_artifact, structured_outputs_backend="llguidance", max_num_seqs=8, num_threads=1) as other:
        for form in FORMS:
            for how in HOW:
                found = ids(other.generate(PROMPTS, params_of(form, how)))
                assert found == [alone[prompt, form, how] for prompt in PROMPTS]
        with pytest.raises(RequestError, match=r"structured_outputs.regex: .*unclosed group"):
            other.generate("a", SamplingParams(structured_outputs={"regex": "(a"}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 4, "max_num_seqs": 4},
        {"prefix_cache": False, "num_threads": 2},
        {"kv_memory_bytes": 5 * BLOCK_BYTES, "overcommit": True},
        {"pipeline": False},
    ],
    ids=str,
)
def test_what_runs_beside_changes_nothing(
    tiny_artifact: Path, alone: dict[tuple[str, str, str], list[int]], options: dict[str, Any]
) -> None:
    """Forms and free answers, greedy and seeded, in one batch: with chunks, preemption, and without the pipeline."""
    with LLM(tiny_artifact, **{"num_threads": 1, **options}) as other:
        prompts, params = [], []
        for prompt, form, how in alone:
            free = SamplingParams(max_tokens=64, ignore_eos=True, **HOW[how])
            prompts.append(prompt)
            params.append(free if form == "free" else params_of(form, how))
        assert ids(other.generate(prompts, params)) == list(alone.values())
        assert (other.stats().num_preemptions > 0) == ("kv_memory_bytes" in options)


@pytest.mark.parametrize("target", ["onnx", "reference"])
def test_other_targets_hold_to_forms(tiny_llama_folder: Path, tmp_path: Path, target: str) -> None:
    compile(tiny_llama_folder, tmp_path / "out", CompileConfig(target=target, certify="none"))
    with LLM(tmp_path / "out", max_num_seqs=4) as other:
        params = [params_of("regex", "greedy"), params_of("choice", "seeded"), params_of("regex", "seeded")]
        first, second, third = (answer.outputs[0] for answer in other.generate(PROMPTS[:3], params))
        assert has_form("regex", first.text) and has_form("choice", second.text) and has_form("regex", third.text)
        free = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        together = other.generate(PROMPTS[:2], [params[0], free])
        assert ids(together) == [first.token_ids, ids(other.generate(PROMPTS[1], free))[0]]


def test_sequences_of_a_request_have_each_their_own_place(llm: LLM) -> None:
    (answer,) = llm.generate(PROMPTS[0], params_of("regex", "seeded", n=4))
    texts = [output.text for output in answer.outputs]
    assert all(has_form("regex", text) for text in texts) and len(set(texts)) == 4


def test_other_parameters_hold_beside_a_form(llm: LLM) -> None:
    answer = llm.generate(PROMPTS[0], params_of("regex", "greedy", stop=("-",), logprobs=2))[0].outputs[0]
    assert re.fullmatch("[a-z]{30,40}", answer.text) and answer.stop == "-"
    raw = llm.score(llm.text.encode(PROMPTS[0]) + answer.token_ids).logprobs[-len(answer.token_ids) :]
    assert answer.logprobs is not None
    assert [entry.logprob for entry in answer.logprobs] == pytest.approx(raw, abs=1e-5), "they are the model's own"
    most = llm.generate(PROMPTS[0], params_of("regex", "greedy", banned_token_ids=(answer.token_ids[0],)))[0]
    assert has_form("regex", most.outputs[0].text) and most.outputs[0].token_ids[0] != answer.token_ids[0]


def test_a_form_that_cannot_be_held_to_is_refused_and_disturbs_nobody(
    llm: LLM, alone: dict[tuple[str, str, str], list[int]]
) -> None:
    bad = SamplingParams(structured_outputs={"regex": "(a"})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"structured_outputs.regex: .*The parenthesis is not closed"):
        llm.generate(PROMPTS[0], bad)
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    llm.submit(PROMPTS[0], params_of("regex", "greedy"), answers.put)
    llm.submit(PROMPTS[0], bad, answers.put)
    assert ids(llm.generate(PROMPTS[1], params_of("schema", "seeded"))) == [alone[PROMPTS[1], "schema", "seeded"]]
    assert {type(answers.get()).__name__ for _ in range(2)} == {"RequestError", "RequestOutput"}


def test_nothing_left_to_choose_ends_the_request(llm: LLM) -> None:
    digits = tuple(range(10_000)) if llm.text.tokenizer.get_vocab_size() > 10_000 else tuple(range(5, 200))
    params = SamplingParams(structured_outputs={"regex": r"[a-z]"}, banned_token_ids=digits)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="allowed_token_ids: it leaves none of the tokens that may come next"):
        llm.generate(PROMPTS[0], SamplingParams(structured_outputs=params.structured_outputs, allowed_token_ids=(3,)))
    assert llm.stats().num_running == 0


def test_a_request_is_aborted_while_its_grammar_is_compiled(tiny_artifact: Path) -> None:
    slow = " | ".join(f'"v{number}"' for number in range(20_000))
    form = StructuredOutputs(grammar=f"root ::= {slow}")
    engine = load_engine(tiny_artifact, max_num_seqs=2, num_threads=1)
    try:
        engine.add_request("slow", [5, 6], SamplingParams(n=2, structured_outputs=form))
        with pytest.raises(RequestError, match="'slow' is in use"):
            engine.add_request("slow", [5, 6], SamplingParams())
        assert engine.has_work and engine.request_ids == ["slow"] and engine.idle_seconds
        assert engine.stats().num_waiting == 2 and engine.stats().waiting_ids == ["slow"]
        engine.add_request("quick", [5, 6], SamplingParams(max_tokens=2, ignore_eos=True))
        outputs = [output for _ in range(4) for output in engine.step()]
        assert {output.request_id for output in outputs} == {"quick"}, "it holds up no other"
        engine.abort("slow", 0)
        assert engine.stats().num_waiting == 1
        engine.abort("slow")
        assert not engine.has_work and not engine.request_ids
    finally:
        engine.close()


def test_a_fault_of_the_library_costs_its_request_alone(
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(tiny_artifact, max_num_seqs=2, num_threads=1) as llm:

        def fails(*_: object) -> None:
            raise RuntimeError("an internal name")

        with monkeypatch.context() as patch:
            patch.setattr(GrammarCompiler, "_compile", fails)
            with pytest.raises(RequestError, match=r"regex: it cannot be compiled, by a mistake of the engine's own"):
                llm.generate(PROMPTS[0], params_of("regex", "greedy"))
        assert "an internal name" in caplog.text
        assert has_form("choice", llm.generate(PROMPTS[0], params_of("choice", "greedy"))[0].outputs[0].text)


def test_an_artifact_without_end_tokens_or_tokenizer_refuses(tiny_artifact: Path) -> None:
    assert model_limits(load_artifact(tiny_artifact)).eos_token_ids
    engine = load_engine(tiny_artifact, max_num_seqs=2, num_threads=1)
    params = params_of("regex", "greedy")
    try:
        grammars, engine.grammars = engine.grammars, Grammars(None, 2, 8)
        with pytest.raises(RequestError, match="structured_outputs.regex: this engine does not hold answers to a form"):
            engine.add_request("a", [5], params)
        engine.grammars = grammars
        engine.model = type(engine.model)(engine.model.vocab_size, engine.model.max_model_len)
        with pytest.raises(RequestError, match="structured_outputs.regex: the model has no end token"):
            engine.add_request("a", [5], params)
    finally:
        engine.close()
