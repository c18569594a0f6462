"""The work on one OpenAI request: its prompts are tokenized, scored if asked for, and answered at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from inferc.errors import RequestError
from inferc.runtime.engine.best_of import best, computed
from inferc.runtime.engine.request_output import CompletionOutput
from inferc.runtime.openai.answer import Answer, EchoedPrompt, Token, Usage, prompt_offsets
from inferc.runtime.openai.reasoning_wishes import as_the_model_can
from inferc.runtime.openai.request import OpenAIRequest, Prompt
from inferc.runtime.reasoning.reasoning import reasoning_of
from inferc.runtime.step.plan import Logprobs
from inferc.runtime.tools.tools import held
from inferc.serve.answering.entry_limits import check_likely, check_prompt_entries
from inferc.serve.answering.logprobs_json import PromptJson, prompt_json
from inferc.serve.answering.reasoning import ReasoningApart
from inferc.serve.models.long_texts import in_text_thread
from inferc.serve.models.served_model import TEXTS_AT_ONCE, ServedModel
from inferc.serve.models.streams import Delta, Stream
from inferc.serve.models.tasks import gather_some

OPENED_AT_ONCE = 32  # streams opened before other tasks get a turn, which takes some milliseconds
MANY_ENTRIES = 1 << 12  # tokens or characters of an answer that are encoded on the event loop, in some milliseconds
MANY_LISTED = 1 << 12  # token ids in parameters of the streams that are opened before other tasks get a turn


class Answering:
    """The streams of a request, which must be closed when done, whatever happened.

    Choice i of prompt p has the index p * n + i.
    """

    def __init__(self, model: ServedModel, request: OpenAIRequest, request_id: str = "") -> None:
        """Check that the request may be taken now; raises the same errors as AsyncEngine.check_open."""
        self.model = model
        self.request = request if request.reasoning is None else as_the_model_can(request, model.engine.text)
        # What is streamed cannot be chosen from: the engine refuses it.
        params = request.params if request.stream else computed(request.params)
        # calls: the form of the answer's calls, if it may have any
        is_within = request.reasoning == "in_text"
        self.params, self.calls = held(params, request.tools, lambda: model.engine.text, is_within)
        self._apart: ReasoningApart | None = None  # tells reasoning from text, if the model's answers may have any
        if self.request.max_reasoning_tokens is not None:
            model.engine.text.check_reasoning()
        self._request_id = request_id
        self._news = asyncio.Event()
        self._streams: list[Stream] = []
        self._prompts: list[PromptJson] = []
        self.num_entries = 0  # entries that all choices report about their prompts
        model.check_open(self.params, len(request.prompts), self.request.num_sequences)

    async def start(self) -> None:
        """Tokenize and score the prompts, and open their streams.

        Raises the same errors as AsyncEngine.open, and RequestError if the answer would report too much about the
        prompts.
        """
        ids = await self._encoded()
        num_tokens = sum(map(len, ids))
        # Refused before the work is done, as far as it can be.
        self.num_entries = check_prompt_entries(self.request, self._top, num_tokens, 0)
        texts = [await self._text(prompt, each) for prompt, each in zip(self.request.prompts, ids, strict=True)]
        check_prompt_entries(self.request, self._top, num_tokens, sum(map(len, texts)))
        self._prompts = await gather_some(self._prompt_json, list(zip(texts, ids, strict=True)), TEXTS_AT_ONCE)
        if self.request.generates:
            if self.params.has_texts:
                self.params = await self.model.spelled(self.params)
            self._begin_reasoning(ids)
            marks = {} if self.calls is None else dict(self.calls.marks)
            marks |= {} if self._apart is None else self._apart.marks or {}
            at_once = max(1, min(OPENED_AT_ONCE, MANY_LISTED // max(1, self.params.num_listed)))
            for number, each in enumerate(ids):
                if number % at_once == at_once - 1:
                    await asyncio.sleep(0)  # give other tasks a turn: there may be a thousand prompts
                name = self._request_id if len(ids) == 1 or not self._request_id else f"{self._request_id}-{number}"
                stream = self.model.open(
                    each, self.params, name, self._news, self.request.kind, marks, self.request.beams
                )
                self._streams.append(stream)

    def _begin_reasoning(self, ids: Sequence[Sequence[int]]) -> None:
        """Prepare to tell reasoning from text, as the prompt leaves it, and let the answer's form begin behind it."""
        if (shown := self.request.reasoning) is None:
            return
        limit = self.request.max_reasoning_tokens
        called = None if self.calls is None else self.calls.begun
        reasoning, self.params = reasoning_of(self.model.engine.text, ids[0], self.params, limit, called)
        self._apart = (
            None if reasoning is None else ReasoningApart(reasoning, shown, as_it_grows=self.request.streams_reasoning)
        )

    def close(self) -> None:
        for stream in self._streams:
            stream.close()

    async def deltas(self) -> AsyncGenerator[tuple[int, int, Delta], None]:
        """Yield (prompt, choice, delta) for all streams as deltas come; raise the error that ends one of them."""
        n, left = self.params.n, dict(enumerate(self._streams))
        if not self.request.generates:
            for index in range(len(self._prompts) * n):
                await asyncio.sleep(0)  # give other tasks a turn
                yield index // n, index, Delta(index % n, "", [], "length", [])
        while left:
            await self._news.wait()
            self._news.clear()
            for number, stream in list(left.items()):
                while (delta := stream.take()) is not None:
                    index = number * n + delta.index
                    yield number, index, delta if self._apart is None else self._apart.of(index, delta)
                if stream.is_done:
                    del left[number]

    async def answers(self) -> list[Answer]:
        """Return the complete answers; raise RequestError as soon as they have too many entries for one answer."""
        outputs = [[Growing(index) for index in range(self.params.n)] for _ in self._prompts]
        num_entries = 0
        async for number, _, delta in self.deltas():
            outputs[number][delta.index].add(delta)
            num_entries += self.num_likely(delta)
            self.check_likely(num_entries)
        return [
            Answer(
                self._prompts[number].num_tokens,
                self._num_cached(number),
                best([each.so_far() for each in of_prompt], self.request.params),
                [each.reasoning for each in of_prompt],
                self._num_reasoning,
            )
            for number, of_prompt in enumerate(outputs)
        ]

    def usage(self, counts: dict[int, int]) -> list[Usage]:
        """Return the usage so far of each prompt; counts: number of output tokens by prompt."""
        return [self.usage_of(number, counts.get(number, 0)) for number in range(len(self._prompts))]

    def usage_of(self, number: int, count: int) -> Usage:
        """Return the usage so far of one prompt; count: its number of output tokens."""
        return Usage(self._prompts[number].num_tokens, self._num_cached(number), count, self._num_reasoning)

    def num_before(self, index: int, is_whole: bool = False) -> int | None:
        """Return how many tokens of a choice stand before its text, as ReasoningApart does."""
        return 0 if self._apart is None else self._apart.num_before(index, is_whole)

    @property
    def may_reason(self) -> bool:
        """True if an answer may show reasoning apart from its text."""
        return self._apart is not None and self.request.reasoning == "apart"

    def num_likely(self, delta: Delta) -> int:
        """Return how many tokens and likely tokens a delta has log probabilities of."""
        return len(delta.logprobs) * (1 + (self.params.logprobs or 0))

    def check_likely(self, num_entries: int) -> None:
        """End the request and raise RequestError if its answer has more entries than one answer may have."""
        check_likely(num_entries, self._streams)

    def prompt_json(self, number: int) -> PromptJson:
        """Return the part of the answer that is about a prompt."""
        return self._prompts[number]

    def token(self, token_id: int) -> Token:
        data = self.model.engine.text.token_bytes(token_id)
        return data.decode(errors="replace"), list(data)

    @property
    def _num_reasoning(self) -> int | None:
        return None if self._apart is None else self._apart.num_tokens

    def _num_cached(self, number: int) -> int:
        return self._streams[number].num_cached if self._streams else 0

    async def _encoded(self) -> list[list[int]]:
        """Return the token ids of all prompts; raise RequestError for one that is too long."""
        prompts: Any = self.request.prompts
        if self.request.kind == "chat":
            return [await self.model.encode_chat(messages, self.request.template) for messages in prompts]
        room = 1 if self.request.generates else 0
        for prompt in prompts:
            if not isinstance(prompt, str):
                self.model.check_length(len(prompt), room)
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        of_texts = iter(await self.model.encode_all(texts, self.request.add_special_tokens))
        return [next(of_texts) if isinstance(prompt, str) else prompt for prompt in prompts]

    @property
    def _top(self) -> int | None:
        """The number of likely tokens at each position of a prompt; None: its log probabilities are not asked for."""
        of_echo = self.params.logprobs if self.request.echo else None
        wanted = [top for top in (of_echo, self.request.prompt_logprobs) if top is not None]
        return max(wanted, default=None)

    async def _text(self, prompt: Prompt, ids: list[int]) -> str:
        """Return the text of a prompt if it is echoed, else ""."""
        if not self.request.echo:
            return ""
        return prompt if isinstance(prompt, str) else await in_text_thread(partial(self.model.decode, ids, False))

    async def _prompt_json(self, prompt: tuple[str, list[int]]) -> PromptJson:
        """Make the part of the answer that is about a prompt, given as its echoed text and its token ids."""
        text, ids = prompt
        request, params, top = self.request, self.params, self._top
        rows: list[Logprobs] | None = None if top is None else []  # no rows for a single token: nothing comes before it
        if top is not None and not ids:
            raise RequestError("prompt: it is empty; give at least one token")
        if top is not None and len(ids) > 1:
            rows = (await self.model.score(ids, max(top, 1), cache_salt=params.cache_salt, n=params.n)).rows
        elif not request.generates:
            self.model.count(len(ids), params.n)

        def make() -> PromptJson:
            offsets: list[int] = []
            if request.echo and rows is not None:
                offsets = prompt_offsets(text, ids, self.token, self.model.engine.text.special_ids)
            wanted = [replace(row, top=()) for row in rows] if rows and not top else rows
            return prompt_json(request, EchoedPrompt(text, ids, wanted, offsets), self.token)

        is_much = len(text) + len(ids) * (1 + (top or 0)) > MANY_ENTRIES
        return await in_text_thread(make) if is_much else make()


class Growing:
    """An output that grows delta by delta."""

    def __init__(self, index: int) -> None:
        self._output, self._texts, self._thoughts = CompletionOutput(index), list[str](), list[str]()

    def add(self, delta: Delta) -> None:
        output = self._output
        self._texts.append(delta.text)
        self._thoughts.append(delta.reasoning)
        output.token_ids += delta.token_ids
        output.finish_reason, output.stop = delta.finish_reason, delta.stop
        if delta.logprobs:
            output.logprobs = [] if output.logprobs is None else output.logprobs
            output.logprobs += delta.logprobs

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return "".join(self._thoughts)

    def so_far(self) -> CompletionOutput:
        return replace(self._output, text="".join(self._texts))
