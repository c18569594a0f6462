"""One OpenAI request at work: its prompts tokenized, scored where that is asked for, and answered, all at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial
from typing import Any

from inferc.errors import RequestError
from inferc.runtime.llm import CompletionOutput
from inferc.runtime.openai_answer import Answer, EchoedPrompt, Token, prompt_offsets
from inferc.runtime.openai_request import OpenAIRequest, Prompt
from inferc.serve.long_texts import in_text_thread
from inferc.serve.models import ServedModel
from inferc.serve.openai_chunks import add_piece
from inferc.serve.streams import Piece, Stream
from inferc.serve.waiting import gather

OPENED_AT_ONCE = 32  # streams: some milliseconds
MANY_LISTED = 1 << 12  # token ids of a request's parameters: those of 32 streams would take longer


class Answering:
    """The streams of a request; close it when done, whatever happened. Choice i of prompt p has the index p * n + i."""

    def __init__(self, model: ServedModel, request: OpenAIRequest, request_id: str = "") -> None:
        """Raises as AsyncEngine.check_open."""
        self.model, self.request = model, request
        self.params = request.params
        self._request_id = request_id
        self._news = asyncio.Event()
        self._streams: list[Stream] = []
        self._prompts: list[EchoedPrompt] = []
        if request.generates:
            model.check_open(self.params, len(request.prompts))

    async def start(self) -> None:
        """Tokenize and score the prompts, and open their streams. Raises as AsyncEngine.open."""
        ids = await self._encoded()
        self._prompts = await gather(
            self._echoed(prompt, each) for prompt, each in zip(self.request.prompts, ids, strict=True)
        )
        if self.request.generates:
            for number, each in enumerate(ids):
                if number % OPENED_AT_ONCE == OPENED_AT_ONCE - 1 or self.params.num_listed > MANY_LISTED:
                    await asyncio.sleep(0)  # others have their turn: there may be a thousand
                name = self._request_id if len(ids) == 1 or not self._request_id else f"{self._request_id}-{number}"
                self._streams.append(self.model.open(each, self.params, name, self._news))

    def close(self) -> None:
        for stream in self._streams:
            stream.close()

    async def pieces(self) -> AsyncGenerator[tuple[int, int, Piece], None]:
        """(prompt, choice, piece) of all of them as they come. Raises what ends one of the streams."""
        n, left = self.params.n, dict(enumerate(self._streams))
        while left:
            await self._news.wait()
            self._news.clear()
            for number, stream in list(left.items()):
                while (piece := stream.take()) is not None:
                    yield number, number * n + piece.index, piece
                if stream.is_done:
                    del left[number]

    async def answers(self) -> list[Answer]:
        """All of it at once."""
        outputs = [[CompletionOutput(index) for index in range(self.params.n)] for _ in self._streams]
        async for number, _, piece in self.pieces():
            add_piece(outputs[number][piece.index], piece)
        return [self._answer(number, outputs[number] if self._streams else []) for number in range(len(self._prompts))]

    def usage(self, counts: dict[int, int]) -> list[Answer]:
        """What has been counted so far, by prompt; counts: output tokens of each."""
        return [
            self._answer(number, [CompletionOutput(0, token_ids=[0] * counts.get(number, 0))])
            for number in range(len(self._prompts))
        ]

    def echoed(self, number: int) -> EchoedPrompt | None:
        """What is told of a prompt."""
        request = self.request
        if request.echo or request.prompt_logprobs is not None or request.return_token_ids:
            return self._prompts[number]
        return None

    def token(self, token_id: int) -> Token:
        data = self.model.engine.text.token_bytes(token_id)
        return data.decode(errors="replace"), list(data)

    def _answer(self, number: int, outputs: list[CompletionOutput]) -> Answer:
        prompt = self._prompts[number]
        cached = self._streams[number].num_cached if self._streams else 0
        return Answer(len(prompt.token_ids), cached, outputs, self.echoed(number))

    async def _encoded(self) -> list[list[int]]:
        """Token ids of all prompts. Raises RequestError for one that is too long."""
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

    def _offsets(self, text: str, ids: list[int]) -> list[int]:
        if not self.request.echo:
            return []
        return prompt_offsets(text, ids, self.token, self.model.engine.text.special_ids)

    async def _echoed(self, prompt: Prompt, ids: list[int]) -> EchoedPrompt:
        request = self.request
        text = ""
        if request.echo:
            text = prompt if isinstance(prompt, str) else await in_text_thread(partial(self.model.decode, ids, False))
        top = request.prompt_logprobs
        if request.echo and self.params.logprobs is not None:
            top = max(self.params.logprobs, top or 0)
        if top is None:
            return EchoedPrompt(text, ids)
        if len(ids) < 2:  # nothing comes before the only token
            if not ids:
                raise RequestError("prompt: it is empty; give at least one token")
            return EchoedPrompt(text, ids, [], self._offsets(text, ids))
        score = await self.model.score(ids, max(top, 1), cache_salt=self.params.cache_salt)
        rows = score.rows if top else [replace(row, top=()) for row in score.rows]
        return EchoedPrompt(text, ids, rows, self._offsets(text, ids))
