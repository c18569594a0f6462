"""Programs on a running server, over a Client."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Protocol

from inferc.client.messages import Delta, Score, ServerError
from inferc.errors import InfercError
from inferc.runtime.programs.endpoint import MARK, Endpoint, Messages, Part
from inferc.serve.protos.inferc.v1 import inference_pb2 as pb


class Calls(Protocol):
    """The calls of a Client that programs use."""

    def generate(self, prompt: Sequence[int], **options: Any) -> Generator[Delta]: ...

    def score(self, prompt: Sequence[int], *, first: int, cache_salt: str) -> Score: ...

    def abort(self, request_id: str) -> bool: ...

    def tokenize(self, text: str | Messages, *, add_special_tokens: bool = True, **of_chat: Any) -> list[int]: ...

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, ids: Sequence[int]) -> bytes: ...

    def model_info(self) -> pb.GetModelInfoResponse: ...


class ClientEndpoint(Endpoint):
    """The model that a Client's calls are for."""

    def __init__(self, client: Calls) -> None:
        self._client = client

    @cached_property
    def end_token_ids(self) -> frozenset[int]:
        return frozenset(self._client.model_info().eos_token_ids)

    def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._client.tokenize(text, add_special_tokens=add_special_tokens)

    def tokenize_turn(self, messages: Messages, num_known: int, add_generation_prompt: bool) -> list[int]:
        return self._client.tokenize(
            list(messages), num_known=num_known, mark=MARK, add_generation_prompt=add_generation_prompt
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._client.detokenize(token_ids, skip_special_tokens=False)

    def token_bytes(self, token_ids: Sequence[int]) -> bytes:
        return self._client.token_bytes(token_ids)

    def open(self, token_ids: Sequence[int], sampling: Mapping[str, Any]) -> _Request:
        return _Request(self._client, token_ids, sampling)

    def score(self, token_ids: Sequence[int], first: int, cache_salt: str) -> list[float]:
        score = self._client.score(token_ids, first=first, cache_salt=cache_salt)
        return [entry.logprob for entry in score.logprobs]


class _Request:
    """A stream of a server, which `cancel` ends by the name that it was given."""

    def __init__(self, client: Calls, token_ids: Sequence[int], sampling: Mapping[str, Any]) -> None:
        self._client, self._name = client, f"program-{uuid.uuid4().hex}"
        self._deltas = client.generate(token_ids, request_id=self._name, **sampling)
        self._cancelled = threading.Event()

    def __iter__(self) -> Iterator[Part]:
        try:
            for delta in self._deltas:
                if self._cancelled.is_set():
                    return
                cached = delta.usage.cached_tokens if delta.usage is not None else 0
                yield Part(delta.text, delta.token_ids, delta.finish_reason, cached)
        except ServerError:
            if not self._cancelled.is_set():
                raise
        finally:
            self._deltas.close()

    def cancel(self) -> None:
        self._cancelled.set()
        with suppress(InfercError):  # it has ended, or the server has
            self._client.abort(self._name)
