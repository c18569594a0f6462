"""Beam search over HTTP and gRPC: the answers of LLM.beam_search, beside other requests, and gone with the client."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from http_calls import request
from serving import Server, wait_until

from inferc import LLM, BeamSearchParams
from inferc.client import Client
from inferc.errors import RequestError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPTS = ("def add(first", "for name in", "The quick brown fox jumps over the lazy dog, and then")
STOPS = [30, 40, 50]  # so that answers end at different lengths
BEAMS: dict[str, Any] = {"use_beam_search": True, "n": 4, "max_tokens": 12, "stop_token_ids": STOPS}
MESSAGES = [{"role": "user", "content": "Name a colour"}]


@pytest.fixture(scope="module")
def llm(tiny_artifact: Path) -> Iterator[LLM]:
    with LLM(tiny_artifact, max_num_seqs=8, num_threads=1) as made:
        yield made


@pytest.fixture(scope="module")
def narrow(tiny_artifact: Path) -> Iterator[Server]:
    """A server whose steps have room for a part of a search's beams, and whose requests have limits."""
    with Server(tiny_artifact, "--max-num-seqs", "3", "--max-n", "6") as server:
        yield server


def expected(llm: LLM, prompt: Any, width: int, max_tokens: int = 12, **others: Any) -> list[tuple[list[int], str]]:
    params = BeamSearchParams(width, max_tokens, stop_token_ids=tuple(STOPS), **others)
    return [(each.token_ids, each.finish_reason) for each in llm.beam_search(prompt, params)[0].sequences]


def choices(url: str, body: dict[str, Any], path: str = COMPLETIONS) -> list[tuple[list[int], str]]:
    reply = request(url, path, {**body, "return_token_ids": True})
    assert reply.status == 200, reply.json
    assert [choice["index"] for choice in reply.json["choices"]] == list(range(len(reply.json["choices"])))
    return [(choice["token_ids"], choice["finish_reason"]) for choice in reply.json["choices"]]


@pytest.mark.parametrize(
    "others",
    [{}, {"length_penalty": 2.0}, {"length_penalty": -1, "early_stopping": "never"}, {"early_stopping": True}],
    ids=["plain", "long", "short", "early"],
)
def test_answers_are_those_of_the_embedded_search(llm: LLM, url: str, others: dict[str, Any]) -> None:
    for prompt in PROMPTS:
        wanted = expected(llm, prompt, 4, **others)
        assert choices(url, {**BEAMS, **others, "prompt": prompt}) == wanted
        assert len(wanted) == 4 and len({tuple(ids) for ids, _ in wanted}) == 4


def test_of_more_beams_the_best_are_answers(llm: LLM, url: str) -> None:
    body = {**BEAMS, "prompt": PROMPTS[0], "n": 2, "best_of": 5}
    assert choices(url, body) == expected(llm, PROMPTS[0], 5)[:2]
    reply = request(url, COMPLETIONS, {**body, "return_token_ids": True}).json
    assert reply["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in reply["choices"])
    (best,) = choices(url, {**body, "n": 1, "temperature": 0})
    assert best == expected(llm, PROMPTS[0], 5)[0]


def test_texts_have_no_end_tokens(llm: LLM, url: str) -> None:
    (found,) = llm.beam_search(PROMPTS[1], BeamSearchParams(4, 12, stop_token_ids=tuple(STOPS)))
    reply = request(url, COMPLETIONS, {**BEAMS, "prompt": PROMPTS[1], "echo": True}).json
    for choice, sequence in zip(reply["choices"], found.sequences, strict=True):
        ids = sequence.token_ids[:-1] if sequence.finish_reason == "stop" else sequence.token_ids
        assert choice["text"] == PROMPTS[1] + llm.text.decode(ids)


def test_chats_are_searched(llm: LLM, url: str) -> None:
    ids = llm.text.encode_chat(MESSAGES)
    found = choices(url, {**BEAMS, "messages": MESSAGES, "n": 3}, CHAT)
    assert found == expected(llm, {"prompt_token_ids": ids}, 3)
    reply = request(url, CHAT, {**BEAMS, "messages": MESSAGES, "n": 1, "best_of": 3}).json
    assert reply["choices"][0]["message"]["role"] == "assistant" and len(reply["choices"]) == 1


def test_searches_run_beside_one_another_and_other_requests(llm: LLM, narrow: Server) -> None:
    """Three searches of several prompts and greedy requests, on an engine that runs three sequences at a time."""
    wanted = [each for prompt in PROMPTS for each in expected(llm, prompt, 4)]
    body = {**BEAMS, "prompt": list(PROMPTS)}
    greedy = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    with ThreadPoolExecutor(6) as pool:
        searches = [pool.submit(choices, narrow.url, body) for _ in range(3)]
        others = [pool.submit(choices, narrow.url, greedy) for _ in range(3)]
        assert all(each.result() == wanted for each in searches)
        assert all(each.result() == others[0].result() for each in others)
    assert_idle(narrow)


def test_the_same_over_grpc(llm: LLM, served: str) -> None:
    with Client(served) as client:
        for width, early in ((None, "never"), (5, False), (5, True)):
            beams = {"length_penalty": 0.5, "early_stopping": early, **({} if width is None else {"width": width})}
            options: dict[str, Any] = {"n": 4, "max_tokens": 12, "stop_token_ids": STOPS, "beam_search": beams}
            found = [(list(each.token_ids), each.finish_reason) for each in client.complete(PROMPTS[0], **options)]
            assert found == expected(llm, PROMPTS[0], width or 4, length_penalty=0.5, early_stopping=early)[:4]
        with pytest.raises(RequestError, match="beam_search: its answers are known when it ends; call Complete"):
            list(client.generate(PROMPTS[0], max_tokens=4, beam_search={}))
        with pytest.raises(RequestError, match="top_p is 0.5, and a beam search takes the likeliest answers as they"):
            client.complete(PROMPTS[0], top_p=0.5, beam_search={})
        with pytest.raises(RequestError, match="best_of 2 is less than n 3; raise it"):
            client.complete(PROMPTS[0], n=3, beam_search={"width": 2})
        with pytest.raises(RequestError, match="beam_search: early_stopping is 'soon'; expected True, False or never"):
            client.complete(PROMPTS[0], beam_search={"early_stopping": "soon"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stream": True}, "stream is true, and a beam search knows its answers when it ends"),
        ({"top_p": 0.5}, "top_p is 0.5, and a beam search takes the likeliest answers as they are; leave top_p out"),
        ({"temperature": 0.7}, "temperature is 0.7, and a beam search takes"),
        ({"logprobs": 0}, "logprobs is 0, and a beam search takes"),
        ({"stop": ["x"]}, 'stop is ["x"], and a beam search takes'),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs is"),
        ({"n": 4, "best_of": 2}, "best_of 2 is less than n 4; raise it, or leave it out"),
        ({"n": 40}, "beam_width is 40: with "),
        ({"length_penalty": 1000}, "length_penalty is 1000, expected a number between -100 and 100"),
        ({"early_stopping": "soon"}, "early_stopping is 'soon', expected true, false or never"),
        ({"use_beam_search": False, "length_penalty": 2}, "length_penalty is 2, which a beam search reads; set use_b"),
    ],
)
def test_what_does_not_go_with_a_search_is_refused_by_name(url: str, fields: dict[str, Any], message: str) -> None:
    reply = request(url, COMPLETIONS, {"prompt": "a", "max_tokens": 4, "use_beam_search": True, **fields})
    assert reply.status == 400 and reply.error["message"].startswith(message), reply.error


def test_interfaces_without_it_refuse_it(url: str) -> None:
    for path, body in (
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}),
    ):
        reply = request(url, path, {**body, "use_beam_search": True}, {"anthropic-version": "2023-06-01"})
        assert reply.status == 400 and "use_beam_search is true, which is not built yet" in str(reply.json), path


def test_a_search_within_the_limits_of_its_caller(narrow: Server) -> None:
    reply = request(narrow.url, COMPLETIONS, {**BEAMS, "prompt": "a", "n": 1, "best_of": 7})
    assert reply.status == 400 and reply.error["message"] == "n is 7; at most 6 is allowed here"


def test_a_client_that_leaves_ends_its_search(narrow: Server) -> None:
    connection = http.client.HTTPConnection(urlsplit(narrow.url).netloc, timeout=20)
    body = {"prompt": "abc", "use_beam_search": True, "n": 6, "max_tokens": 200, "ignore_eos": True}
    connection.request("POST", COMPLETIONS, json.dumps(body), {"content-type": "application/json"})
    with Client(narrow.address) as client, closing(connection):
        wait_until(lambda: client.loads().num_running > 0, "it runs")
    assert_idle(narrow)


def assert_idle(server: Server) -> None:
    with Client(server.address) as client:

        def idle() -> bool:
            loads = client.loads()
            return (loads.num_running, loads.num_waiting, loads.num_requests, loads.kv_usage) == (0, 0, 0, 0.0)

        wait_until(idle, "the engine is idle and its cache empty")
