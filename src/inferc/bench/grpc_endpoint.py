"""The benchmark endpoint for inferc's own gRPC interface; requests are never retried, because a refusal is a result."""

from __future__ import annotations

import time
from typing import Any

from inferc.bench.answers import Answer
from inferc.bench.endpoints import ServerFacts, Target
from inferc.bench.workload import Prompt
from inferc.client.client import AsyncClient, ServerError, Tls
from inferc.errors import InfercError, RequestError


class GrpcEndpoint:
    """An endpoint that sends load to inferc over gRPC without retries, because a refusal is a result."""

    def __init__(self, client: AsyncClient, facts: ServerFacts, target: Target) -> None:
        self.facts = facts
        self._client = client
        self._sampling: dict[str, Any] = {"temperature": target.temperature, "ignore_eos": target.ignore_eos}
        if target.logprobs:
            self._sampling["logprobs"] = 1
        self._sampling["ttft_ms"], self._sampling["tbt_ms"] = target.objectives

    @staticmethod
    async def connect(target: Target) -> GrpcEndpoint:
        tls = None if target.ca is None else Tls(ca=target.ca)
        client = AsyncClient(
            target.address,
            model=target.model or "",
            timeout=target.timeout,
            retries=0,
            api_key=target.api_key,
            tls=tls,
        )
        try:
            info = await client.model_info()
        except InfercError as error:
            await client.close()
            raise type(error)(*_told(error, f"{target.address} does not answer")) from None
        return GrpcEndpoint(client, ServerFacts(info.model, info.vocab_size, info.max_model_len), target)

    def prepare(self, prompt: Prompt, output_len: int) -> object:
        return prompt, output_len

    async def send(self, prepared: object, answer: Answer) -> None:
        assert isinstance(prepared, tuple)
        prompt, output_len = prepared
        start = time.perf_counter()
        pieces = self._client.generate(prompt, max_tokens=output_len, **self._sampling)
        try:
            async for piece in pieces:
                if piece.token_ids:
                    answer.messages.append((time.perf_counter() - start, len(piece.token_ids)))
                if piece.usage is not None:
                    answer.prompt_tokens, answer.cached_tokens = piece.usage.prompt_tokens, piece.usage.cached_tokens
            answer.end(time.perf_counter() - start)
        except RequestError as error:
            answer.fail("INVALID_ARGUMENT", str(error))
        except ServerError as error:
            answer.fail(error.code, str(error))

    async def close(self) -> None:
        await self._client.close()


def _told(error: InfercError, what: str) -> tuple[str, ...]:
    return (error.code, f"{what}: {error}") if isinstance(error, ServerError) else (f"{what}: {error}",)
