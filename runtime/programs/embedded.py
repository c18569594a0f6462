"""Programs on `inferc.LLM`, the engine in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from inferc.runtime.engine.llm import LLM, Stream
from inferc.runtime.programs.endpoint import MARK, Endpoint, Messages, Part
from inferc.runtime.text.turns import Known, render_behind


class EmbeddedEndpoint(Endpoint):
    """The model of an LLM; raises RequestError if its artifact has no tokenizer."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._text = llm, llm.text

    @property
    def end_token_ids(self) -> frozenset[int]:
        return self._llm.end_token_ids

    def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._text.encode(text, add_special_tokens)

    def tokenize_turn(self, messages: Messages, num_known: int, add_generation_prompt: bool) -> list[int]:
        known = Known(num_known, MARK)
        text = render_behind(
            self._text, [dict(each) for each in messages], known, add_generation_prompt=add_generation_prompt
        )
        return self._text.encode_rendered(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._text.decode(token_ids, skip_special_tokens=False)

    def token_bytes(self, token_ids: Sequence[int]) -> bytes:
        return b"".join(map(self._text.token_bytes, token_ids))

    def open(self, token_ids: Sequence[int], sampling: Mapping[str, Any]) -> _Request:
        return _Request(self._llm.stream(token_ids, self._llm.sampling_params(**sampling)))

    def score(self, token_ids: Sequence[int], first: int, cache_salt: str) -> list[float]:
        return self._llm.score(token_ids, first=first, cache_salt=cache_salt).logprobs


class _Request:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[Part]:
        count = 0
        for answer in self._stream:
            output = answer.outputs[0]
            ids = tuple(output.token_ids[count:])
            count += len(ids)
            yield Part(output.new_text, ids, output.finish_reason, answer.num_cached_tokens)

    def cancel(self) -> None:
        self._stream.abort()
