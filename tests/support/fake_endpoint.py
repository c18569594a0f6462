"""A model for programs that answers when a test says so: texts are their bytes as token ids."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from inferc.runtime.programs.endpoint import Endpoint, Messages, Part

END = 256


class FakeEndpoint(Endpoint):
    """Answers each prompt with what `answer` makes of its text; None is an answer that never comes.

    meet: how many requests must be open before any of them is answered.
    """

    def __init__(self, answer: Callable[[str], str | Exception | None], meet: int = 1) -> None:
        self.answer, self.barrier = answer, threading.Barrier(meet)
        self.opened: list[FakeRequest] = []
        self.scored: list[tuple[str, int]] = []

    @property
    def end_token_ids(self) -> frozenset[int]:
        return frozenset({END})

    def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(text.encode())

    def tokenize_turn(self, messages: Messages, num_known: int, add_generation_prompt: bool) -> list[int]:
        return []

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.token_bytes(token_ids).decode()

    def token_bytes(self, token_ids: Sequence[int]) -> bytes:
        return bytes(token for token in token_ids if token != END)

    def open(self, token_ids: Sequence[int], sampling: Mapping[str, Any]) -> FakeRequest:
        request = FakeRequest(self, self.decode(token_ids), sampling)
        self.opened.append(request)
        return request

    def score(self, token_ids: Sequence[int], first: int, cache_salt: str) -> list[float]:
        self.scored.append((self.decode(token_ids), first))
        return [-float(token) for token in token_ids[first:]]


class FakeRequest:
    """A request of it; is_over: whether it was read to its end, or cancelled."""

    def __init__(self, endpoint: FakeEndpoint, prompt: str, sampling: Mapping[str, Any]) -> None:
        self.endpoint, self.prompt, self.sampling = endpoint, prompt, sampling
        self.cancelled = threading.Event()
        self.is_over = False

    def __iter__(self) -> Iterator[Part]:
        try:
            self.endpoint.barrier.wait(30)
            answer = self.endpoint.answer(self.prompt)
            if isinstance(answer, Exception):
                raise answer
            if answer is None:
                self.cancelled.wait(30)
                return
            for letter in answer:
                yield Part(letter, (ord(letter),))
            yield Part("", (END,), "stop")
        finally:
            self.is_over = True

    def cancel(self) -> None:
        self.cancelled.set()
