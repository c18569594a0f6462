"""The best of several outputs are those of the highest log probability among the same outputs asked for one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import run_inferc
from http_calls import request

from inferc import LLM, SamplingParams
from inferc.errors import RequestError

PROMPT = "def add(first"
ASKED: dict[str, Any] = {"temperature": 1.2, "seed": 5, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(tiny_artifact: Path) -> Iterator[LLM]:
    with LLM(tiny_artifact, max_num_seqs=8, num_threads=1) as made:
        yield made


@pytest.fixture(scope="module")
def ranked(llm: LLM) -> list[list[int]]:
    """The token ids of six outputs, the likeliest first."""
    outputs = llm.generate(PROMPT, SamplingParams(**ASKED, n=6, logprobs=0))[0].outputs
    found = sorted(outputs, key=lambda output: output.cumulative_logprob or 0.0, reverse=True)
    assert [output.index for output in found] != list(range(6)), "nothing would have to be chosen"
    return [output.token_ids for output in found]


def test_an_llm_returns_the_best(llm: LLM, ranked: list[list[int]]) -> None:
    for n in (1, 2, 5):
        (answer,) = llm.generate(PROMPT, SamplingParams(**ASKED, n=n, best_of=6))
        assert [output.token_ids for output in answer.outputs] == ranked[:n]
        assert [output.index for output in answer.outputs] == list(range(n))
        assert all(output.logprobs is None for output in answer.outputs), "nobody asked for them"
    (answer,) = llm.generate(PROMPT, SamplingParams(**ASKED, best_of=6, logprobs=2))
    assert [len(row.top) for row in answer.outputs[0].logprobs or ()] == [2] * 8
    assert SamplingParams(**ASKED, n=3, best_of=3) == SamplingParams(**ASKED, n=3)


def test_what_comes_in_parts_is_refused(llm: LLM, url: str) -> None:
    with pytest.raises(RequestError, match="best_of is 6, and the best are known only when all are there"):
        list(llm.stream(PROMPT, SamplingParams(**ASKED, best_of=6)))
    reply = request(url, "/v1/completions", {"prompt": PROMPT, **ASKED, "best_of": 6, "stream": True})
    assert (reply.status, reply.error["param"]) == (400, "best_of")
    assert "leave it out, or ask for a whole answer" in reply.error["message"]


def test_a_server_and_batches_return_the_best(
    ranked: list[list[int]], llm: LLM, url: str, served: str, tiny_artifact: Path, tmp_path: Path
) -> None:
    texts = [llm.text.decode(ids) for ids in ranked[:2]]
    body = {"prompt": [PROMPT, PROMPT], **ASKED, "n": 2, "best_of": 6}
    found = request(url, "/v1/completions", body).json
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in found["choices"]] == texts * 2
    assert [choice["logprobs"] for choice in found["choices"]] == [None] * 4
    assert found["usage"]["completion_tokens"] == 32
    echoed = request(url, "/v1/completions", {**body, "echo": True, "logprobs": 1}).json["choices"]
    assert [choice["text"] for choice in echoed] == [PROMPT + text for text in texts * 2]
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    for number, engine in enumerate((str(tiny_artifact), served)):
        out = tmp_path / f"{number}.jsonl"
        done = run_inferc("batch", tmp_path / "in.jsonl", "-o", out, "--engine", engine)
        assert done.returncode == 0, done.stderr
        choices = json.loads(out.read_text())["response"]["body"]["choices"]
        assert [choice["text"] for choice in choices] == texts * 2
        assert [choice["logprobs"] for choice in choices] == [None] * 4
