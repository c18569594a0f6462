"""The JSON of token ids and log probabilities, encoded in parts."""

import asyncio
import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from inferc.errors import RequestError
from inferc.runtime.engine.request_output import CompletionOutput
from inferc.runtime.openai.answer import EchoedPrompt, Token, chat_logprobs, completion_logprobs, prompt_rows
from inferc.runtime.openai.request import OpenAIRequest
from inferc.runtime.step.plan import Logprobs
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.serve.answering import logprobs_json
from inferc.serve.answering.entry_limits import MAX_CHARACTERS, MAX_ENTRIES, check_prompt_entries
from inferc.serve.answering.logprobs_json import chat_lists, json_items, json_list, prompt_json
from inferc.serve.errors import QueueFull
from inferc.serve.models.long_texts import Turns

ROWS = [Logprobs(each, -0.5 * each, 1, ((each, -0.5 * each), (each + 1, -9.0))) for each in range(1, 30)]
IDS = list(range(30))
REQUEST = OpenAIRequest(
    "completion", (IDS,), {}, echo=True, params=SamplingParams(prompt_logprobs=2), return_token_ids=True
)


def spelled(token_id: int) -> Token:
    text = f"<{token_id}>"
    return text, list(text.encode())


def read(value: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


@pytest.fixture(autouse=True, params=[1, 7, 1 << 13])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs_json, "ENTRIES_AT_ONCE", request.param)


def test_lists_made_in_pieces_are_those_made_at_once() -> None:
    assert read(json_list(json_items(IDS), b"", json_items([True]))) == [*IDS, True] and read(json_list(b"", b"")) == []
    assert read(chat_lists(ROWS, spelled)) == read(chat_logprobs(ROWS, spelled))
    assert read(chat_lists((), spelled)) == read(chat_logprobs((), spelled))


def test_a_choice_tells_the_prompt_and_what_came_behind_it() -> None:
    text = "".join(spelled(each)[0] for each in IDS)
    offsets = [text.index(spelled(each)[0]) for each in IDS]
    prompt = EchoedPrompt(text, IDS, ROWS, offsets)
    output = CompletionOutput(0, 'e"n\u00e9', [3, 4], "stop", logprobs=ROWS[2:4])
    rows = [*prompt.scored, *((row.token_id, row) for row in ROWS[2:4])]
    assert read(prompt_json(REQUEST, prompt, spelled).choice(output, spelled)) == read(
        {
            "text": text + output.text,
            "logprobs": completion_logprobs(rows, spelled, len(text), offsets),
            "prompt_logprobs": [None, *prompt_rows(ROWS, spelled)],
            "prompt_token_ids": IDS,
        }
    )
    alone = prompt_json(OpenAIRequest("completion", (IDS,), {}), prompt, spelled)
    plain = {"text": output.text, "logprobs": None}
    assert read(alone.choice(replace(output, logprobs=None), spelled)) == plain


def test_a_prompt_is_made_once_for_all_its_choices() -> None:
    asked: Counter[int] = Counter()

    def counting(token_id: int) -> Token:
        asked[token_id] += 1
        return spelled(token_id)

    told = prompt_json(REQUEST, EchoedPrompt("", IDS, ROWS, [0] * len(IDS)), counting)
    before = asked.copy()
    for index in range(5):
        told.choice(CompletionOutput(index), counting)
    assert before and asked == before


def test_what_one_answer_tells_is_bounded() -> None:
    def check(num_tokens: int, top: int | None, num_characters: int = 0, n: int = 1, **more: Any) -> int:
        params = SamplingParams(n=n, prompt_logprobs=more.pop("prompt_logprobs", None))
        request = OpenAIRequest("completion", ("",), {}, echo=True, params=params)
        return check_prompt_entries(replace(request, **more), top, num_tokens, num_characters)

    assert check(128 << 10, 5) == 6 * (128 << 10), "what harnesses score"
    assert check(10, 2, n=3, prompt_logprobs=2, return_token_ids=True) == 10 * (3 + 3 + 1) * 3
    assert check(10, 2, n=3, kind="chat", echo=False, prompt_logprobs=2) == 10 * 3
    assert check(MAX_ENTRIES, 0) == MAX_ENTRIES and check(1 << 30, None, MAX_CHARACTERS) == 0
    with pytest.raises(RequestError, match=f"report {2 * MAX_ENTRIES} tokens .* most {MAX_ENTRIES} are reported"):
        check(MAX_ENTRIES, 0, n=2)
    with pytest.raises(
        RequestError, match=f"echo {2 * MAX_CHARACTERS} characters, .* most {MAX_CHARACTERS} are echoed"
    ):
        check(1, None, MAX_CHARACTERS, n=2)


def test_turns_are_bounded_and_given_up_by_who_leaves() -> None:
    done, made = threading.Event(), []

    async def run() -> None:
        turns = Turns("their texts", max_waiting=2)
        first, left = (asyncio.ensure_future(turns.run(work)) for work in (done.wait, lambda: made.append("left")))
        await asyncio.sleep(0)  # so that both have begun to wait
        with pytest.raises(QueueFull, match="2 others wait for their texts; come back later"):
            await turns.run(lambda: None)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        last = asyncio.ensure_future(turns.run(lambda: "last"))
        await asyncio.sleep(0)
        done.set()
        assert (await first, await last) == (True, "last") and not made

    asyncio.run(run())
