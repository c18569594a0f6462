"""Reasoning in `LLM.chat`: beside a text that has it, and apart from a text that is held to a form behind it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from thinking import BEGUN, MARKERS, MAY_BEGIN, Kind, make_thinking

from inferc import LLM, SamplingParams
from inferc.compiler.build import compile
from inferc.config import CompileConfig
from inferc.errors import RequestError
from inferc.runtime.engine.chats import Chats
from inferc.runtime.engine.prompts import ParsedPrompt
from inferc.runtime.engine.request_output import OpenRequest

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]


@pytest.fixture(scope="module", params=get_args(Kind))
def begun(
    tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[tuple[LLM, dict[str, int]]]:
    """A model whose prompts begin its reasoning, with markers of each kind, and their ids."""
    folder = tmp_path_factory.mktemp("begun")
    tokens = make_thinking(tiny_llama_folder, folder / "model", BEGUN, request.param)
    compile(folder / "model", folder / "out", CompileConfig(certify="none"))
    with LLM(folder / "out") as llm:
        yield llm, tokens


@pytest.fixture(scope="module")
def free(tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, dict[str, int]]]:
    """A model that may begin to reason, and the ids of its markers."""
    folder = tmp_path_factory.mktemp("free")
    tokens = make_thinking(tiny_llama_folder, folder / "model", MAY_BEGIN, "token")
    compile(folder / "model", folder / "out", CompileConfig(certify="none"))
    with LLM(folder / "out") as llm:
        yield llm, tokens


def sampled(tokens: dict[str, int], seed: int = 5, **more: Any) -> SamplingParams:
    """Return parameters with which reasoning ends sooner than it would."""
    biased = {token: 4.0 if "</thi" in tokens else 3.0 for marker, token in tokens.items() if marker != "<think>"}
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=120, logit_bias=biased, **more)


@pytest.mark.parametrize("stop", [(), ("e",), ("</think>",), ("nk>",)])
def test_the_text_is_what_the_model_wrote(begun: tuple[LLM, dict[str, int]], stop: tuple[str, ...]) -> None:
    llm, tokens = begun
    num_reasoned = 0
    for seed in range(6):
        params = sampled(tokens, seed, stop=stop)
        (answer,) = llm.chat(HI, params)
        (plain,) = llm.generate(prompt_token_ids=answer.prompt_token_ids, sampling_params=params)
        (output,), (expected,) = answer.outputs, plain.outputs
        assert (output.text, output.token_ids, output.stop) == (expected.text, expected.token_ids, expected.stop)
        assert output.text.strip().startswith(output.reasoning) and expected.reasoning == ""
        assert not any(marker in output.reasoning for marker in MARKERS)
        num_reasoned += bool(output.reasoning)
    assert num_reasoned > 1


def test_reasoning_is_apart_on_demand_and_a_form_behind_it(begun: tuple[LLM, dict[str, int]]) -> None:
    llm, tokens = begun
    form: Any = {"json": SCHEMA}
    params, limit = sampled(tokens, n=2, structured_outputs=form), None
    if "</thi" not in tokens:
        params, limit = SamplingParams(temperature=1.0, seed=5, max_tokens=120, n=2, structured_outputs=form), 12
    (answer,) = llm.chat(HI, params, separate_reasoning=True, max_reasoning_tokens=limit)
    assert any(output.reasoning for output in answer.outputs)
    (at_once,) = llm.chat(HI, params)
    assert not any(output.reasoning for output in at_once.outputs)
    for output in (*answer.outputs, *at_once.outputs):
        assert json.loads(output.text)["city"] in ("Rome", "Paris")


def test_calls_are_those_behind_the_reasoning(free: tuple[LLM, dict[str, int]]) -> None:
    llm, tokens = free
    begins = SamplingParams(temperature=1.0, seed=5, max_tokens=120, logit_bias={tokens["<think>"]: 100.0})
    options: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    (answer,) = llm.chat(HI, begins, separate_reasoning=True, max_reasoning_tokens=6, **options)
    (output,) = answer.outputs
    assert output.reasoning and json.loads(output.tool_calls[0].arguments)["city"] in ("Rome", "Paris")
    assert output.text.startswith("<call>look=") and output.token_ids.index(tokens["</think>"]) <= 10


def test_calls_that_reasoning_names_are_none(free: tuple[LLM, dict[str, int]]) -> None:
    llm, _ = free
    said = '<think>\nI could <call>look={"a": 1}</call>\n</think>\n\n<call>find={}</call>'
    for separates in (False, True):
        chats = Chats(llm.text, TOOLS, None, True, separates, None)
        ids = llm.text.encode("hi")
        opened = OpenRequest.begin(llm.text, ParsedPrompt(token_ids=ids), *chats.asked(ids, SamplingParams()))
        (output,), (stream,) = opened.answer.outputs, opened.streams
        output.token_ids, output.finish_reason = llm.text.encode(said), "length"
        output.text = stream.push(output.token_ids, "length").text
        chats.read([opened.answer])
        assert [call.name for call in output.tool_calls] == ["find"]
        assert output.reasoning == 'I could <call>look={"a": 1}</call>'
        assert output.text == ("<call>find={}</call>" if separates else said)


def test_wishes_that_cannot_be_met_are_refused(free: tuple[LLM, dict[str, int]], tiny_artifact: Path) -> None:
    llm, _ = free
    with pytest.raises(RequestError, match="max_reasoning_tokens is 5, which holds for separate reasoning alone"):
        llm.chat(HI, max_reasoning_tokens=5)
    with pytest.raises(RequestError, match="max_reasoning_tokens is -1; expected at least 0"):
        llm.chat(HI, separate_reasoning=True, max_reasoning_tokens=-1)
    with pytest.raises(RequestError, match="separate_reasoning: expected True or False, found 1"):
        llm.chat(HI, separate_reasoning=1)  # type: ignore[arg-type]
    with LLM(tiny_artifact) as other, pytest.raises(RequestError, match="max_reasoning_tokens"):
        other.chat(HI, separate_reasoning=True, max_reasoning_tokens=5)
