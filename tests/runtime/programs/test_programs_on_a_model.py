"""Programs on a real artifact, in this process and over a server: the prefix cache, chats, and freed requests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import wait_until

from inferc import LLM, RequestError, SamplingParams, gen, program, select, vote
from inferc.client import Client
from inferc.runtime.programs.embedded import EmbeddedEndpoint
from inferc.runtime.programs.program import endpoint_of
from inferc.runtime.programs.state import State

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
# Longer than a block of 32 tokens.
TEXT = "def add(first, second):\n    return first + second\n\n\ndef subtract(first, second):\n    return first - "


@pytest.fixture(scope="module")
def llm(tiny_artifact: Path) -> Iterator[LLM]:
    with LLM(tiny_artifact, max_num_seqs=8, num_threads=1) as made:
        yield made


@pytest.fixture(scope="module")
def chatting(tooled_artifact: Path) -> Iterator[LLM]:
    with LLM(tooled_artifact, num_threads=1) as made:
        yield made


def check_nothing_runs(llm: LLM) -> None:
    assert not llm._client.num_open
    wait_until(lambda: llm.stats().kv_usage == 0, "the step in flight gave its blocks back")
    assert llm.stats().num_running == llm.stats().num_waiting == 0


@program
def two_steps(s: State, text: str, salt: str = "") -> None:
    s += text
    s += gen("first", max_tokens=40, **GREEDY, cache_salt=salt)
    s += "; and then"
    s += gen("second", max_tokens=8, **GREEDY, cache_salt=salt)


def test_the_second_step_finds_all_but_the_last_block(llm: LLM) -> None:
    """The tokens of the first answer are those that were generated, and K and V of all but its last are there."""
    s = two_steps.run(llm, text=TEXT)
    size, first, second = llm.stats().block_size, s.info("first"), s.info("second")
    prompt, between = llm.text.encode(TEXT), llm.text.encode("; and then", add_special_tokens=False)
    assert s.token_ids == [*prompt, *first.token_ids, *between, *second.token_ids]
    assert second.num_prompt_tokens == len(prompt) + 40 + len(between)
    assert second.num_cached_tokens >= (len(prompt) + 39) // size * size >= 2 * size
    assert s.text == TEXT + s["first"] + "; and then" + s["second"] and len(first.token_ids) == 40
    (alone,) = llm.generate([s.token_ids[: second.num_prompt_tokens]], SamplingParams(max_tokens=8, **GREEDY))
    assert tuple(alone.outputs[0].token_ids) == second.token_ids
    check_nothing_runs(llm)


def test_a_fork_computes_the_shared_prompt_once(tiny_artifact: Path) -> None:
    @program
    def forks(s: State) -> list[str]:
        s += TEXT
        forks = s.fork(4)
        for branch in forks:
            branch += gen("x", max_tokens=6, temperature=1.0, seed=1)
        return list(forks["x"])

    with LLM(tiny_artifact, num_threads=1) as llm:
        size, num_prompt = llm.stats().block_size, len(llm.text.encode(TEXT))
        s = forks.run(llm)
        stats = llm.stats()
        assert stats.admitted_tokens == 4 * num_prompt
        assert stats.cached_tokens >= 3 * (num_prompt // size * size) >= 3 * size
        assert len(set(s.result)) > 1, "the branches have seeds of their own"
        assert forks.run(llm).result == s.result
        check_nothing_runs(llm)


def test_choices_are_what_scores_of_whole_texts_choose(llm: LLM) -> None:
    choices = ["first", "second", "a third"]

    @program
    def chooses(s: State, by: Any) -> None:
        s += TEXT
        s += select("x", choices, by=by)
        s += gen("y", max_tokens=2, **GREEDY)

    prompt = llm.text.encode(TEXT)
    ids = [llm.text.encode(each, add_special_tokens=False) for each in choices]
    scores = [llm.score([*prompt, *each]).logprobs[len(prompt) - 1 :] for each in ids]
    for by, value in (("mean", lambda row: sum(row) / len(row)), ("sum", sum)):
        s = chooses.run(llm, by=by)
        assert [list(row) for row in s.info("x").logprobs] == scores
        assert s["x"] == choices[max(range(3), key=lambda index: value(scores[index]))]
        assert s.info("y").num_cached_tokens >= len(prompt) // 32 * 32
    assert chooses.run(llm, by="tokens").token_ids == chooses.run(llm, by="tokens").token_ids
    check_nothing_runs(llm)


@pytest.mark.parametrize("is_cut", [False, True])
def test_the_tokens_behind_a_stop_string(llm: LLM, is_cut: bool) -> None:
    """Tokens stay as generated up to the one in which the stop string begins."""
    (free,) = llm.generate(TEXT, SamplingParams(max_tokens=30, **GREEDY))
    output = free.outputs[0]
    middle = llm.text.decode(output.token_ids[:12])
    stop = output.text[len(middle) + is_cut :][:3]
    expected = output.text[: output.text.index(stop)]

    @program
    def stops(s: State) -> None:
        s += TEXT
        s += gen("x", max_tokens=30, stop=stop, **GREEDY)
        s += "!"

    s = stops.run(llm)
    prompt = llm.text.encode(TEXT)
    assert s["x"] == expected and s.info("x").finish_reason == "stop"
    kept = s.token_ids[len(prompt) : -1]
    assert b"".join(map(llm.text.token_bytes, kept)).decode(errors="replace") == expected
    same = [one == other for one, other in zip(kept, output.token_ids, strict=False)]
    assert len(same) > 4 and all(same[:-2])


def test_answers_have_the_forms_that_they_are_held_to(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}

    @program
    def forms(s: State) -> None:
        s += "x"
        s += gen("regex", max_tokens=40, regex="[0-9]{3}")
        s += gen("choice", max_tokens=40, choice=["left", "right"])
        s += gen("json", max_tokens=100, json=schema)

    s = forms.run(llm)
    assert re.fullmatch("[0-9]{3}", s["regex"]) and s["choice"] in ("left", "right")
    assert json.loads(s["json"])["a"] in (1, 2)
    assert s.text == "x" + s["regex"] + s["choice"] + s["json"]


def test_an_error_frees_what_runs(llm: LLM) -> None:
    @program
    def fails(s: State) -> None:
        s += TEXT
        forks = s.fork(3)
        for index, branch in enumerate(forks):
            branch += gen("x", max_tokens=100, **GREEDY)
            branch += "too long " * (1000 * index)
            branch += gen("y", max_tokens=100, **GREEDY)
        forks.join()

    with pytest.raises(RequestError, match=r'^test_programs_on_a_model.py:\d+: gen\("y"\): .*prompt'):
        fails.run(llm)
    check_nothing_runs(llm)


def test_leaving_a_stream_frees_its_request(llm: LLM) -> None:
    for piece in two_steps.stream(llm, text=TEXT):
        if piece.name == "first":
            break
    check_nothing_runs(llm)
    stream = llm.stream(TEXT, SamplingParams(max_tokens=100, **GREEDY))
    for _ in stream:
        stream.abort()
    check_nothing_runs(llm)


@program
def chat(s: State) -> None:
    s.system("short")
    s.user("hi")
    s.assistant(gen("answer", max_tokens=20, **GREEDY))
    s.user("again")
    s.assistant("it is ", select("good", ["good", "bad"]), "!")
    s.user("more")
    s.assistant("yes")


def test_a_chat_is_what_the_template_writes_of_the_whole(chatting: LLM) -> None:
    s = chat.run(chatting)
    said = [("system", "short"), ("user", "hi"), ("assistant", s["answer"]), ("user", "again")]
    said += [("assistant", f"it is {s['good']}!"), ("user", "more"), ("assistant", "yes")]
    messages = [{"role": role, "content": content} for role, content in said]
    assert s.text == chatting.text.render_chat(messages, add_generation_prompt=False)
    answer = s.info("answer")
    assert tuple(s.token_ids[answer.num_prompt_tokens :][: len(answer.token_ids)]) == answer.token_ids


def test_a_server_gives_what_the_engine_gives(llm: LLM, served: str) -> None:
    @program
    def all_kinds(s: State) -> Any:
        two_steps(s, TEXT)
        s += select("x", ["left", "right"])
        forks = s.fork(2)
        for branch in forks:
            branch += gen("z", max_tokens=5, temperature=1.0, seed=3)
        votes = vote(s, 3, lambda branch: None, lambda branch: "same")
        s += gen("form", max_tokens=40, regex="[a-c]{4}", temperature=0)
        s += gen("stop", max_tokens=20, stop=["e", "a", " "], **GREEDY)
        return forks["z"], votes.answer

    with Client(served, timeout=60) as client:
        here, there = all_kinds.run(llm), all_kinds.run(client)
        assert there.token_ids == here.token_ids and there.text == here.text and there.variables == here.variables
        assert there.result == here.result and there.result[1] == "same"
        assert there.info("x").logprobs == tuple(
            tuple(pytest.approx(each, abs=1e-5) for each in row) for row in here.info("x").logprobs
        )
        assert there.info("second").num_cached_tokens >= 32


def test_a_chat_over_a_server(chatting: LLM, tooled: Any) -> None:
    with Client(tooled.address, timeout=60) as client:
        here, there = chat.run(chatting), chat.run(client)
        assert there.text == here.text and there.token_ids == here.token_ids


def test_a_server_scores_from_a_token_on_and_writes_next_turns(chatting: LLM, tooled: Any) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "zq"}]
    with Client(tooled.address, timeout=60) as client:
        text = client.tokenize(TEXT)
        whole, last = client.score(text), client.score(text, first=len(text) - 3)
        assert [entry.token_id for entry in last.logprobs] == text[-3:] == list(last.token_ids[-3:])
        assert [entry.logprob for entry in last.logprobs] == [entry.logprob for entry in whole.logprobs[-3:]]
        for first in (0, len(text)):
            with pytest.raises(RequestError, match=f"first is {first}; of a text of {len(text)} tokens, 1 to"):
                client.score(text, first=first)
        ends = client.tokenize(messages, num_known=1, mark="zq", add_generation_prompt=False)
        again = client.tokenize([*messages, messages[0]], num_known=2, mark="zq")
        whole_ids = client.tokenize([*messages, messages[0]])
        assert not ends, "this template writes nothing behind an answer"
        assert client.detokenize(again, skip_special_tokens=False) == "<|user|>hi<|assistant|>"
        assert whole_ids[-len(again) :] == again and len(client.tokenize(messages[:1])) > len(messages)
        with pytest.raises(RequestError, match="num_known is 3; expected 0 to 2, the number of messages"):
            client.tokenize(messages, num_known=3)
        with pytest.raises(RequestError, match="num_known: of a conversation; give the prompt as a list of chat mess"):
            client.tokenize("text", num_known=1)
        with pytest.raises(RequestError, match="the request cannot be sent"):
            client.tokenize(messages, num_knwon=1)


def test_leaving_a_stream_of_a_server_frees_its_request(served: str) -> None:
    with Client(served, timeout=60) as client:
        for piece in two_steps.stream(client, text=TEXT):
            if piece.name == "first":
                break
        wait_until(lambda: client.loads().num_running == 0, "the request is freed")


def test_a_server_that_is_not_there_is_told_with_the_line() -> None:
    with Client("127.0.0.1:1", timeout=5, retries=0) as client, pytest.raises(Exception, match=r"\.py:\d+: gen"):
        two_steps.run(client, text=TEXT)


def test_an_artifact_with_a_tokenizer_that_writes_a_space(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts behind other tokens are written without the space of a text's beginning."""
    endpoint = endpoint_of(llm)
    assert isinstance(endpoint, EmbeddedEndpoint)
    plain = endpoint.tokenize
    monkeypatch.setattr(endpoint, "tokenize", lambda text, special: plain(" " + text, special))
    assert endpoint.token_bytes(endpoint.encode("more text", begins=True)) != b"more text"
    for text in ("more text", " x", "\n", "é"):
        assert endpoint.token_bytes(endpoint.encode(text, begins=False)) == text.encode()
