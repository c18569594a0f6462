"""The answer to a conversation as it grows, its reasoning told from its text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from inferc.runtime.engine.llm import LLM
from inferc.runtime.reasoning.reader import Parts
from inferc.runtime.reasoning.reasoning import reasoning_of
from inferc.runtime.step.sampling_params import SamplingParams


def parts_of(llm: LLM, messages: Sequence[dict[str, Any]], params: SamplingParams) -> Iterator[Parts]:
    """Yield the one answer to a conversation in parts as it grows: of its reasoning, and of the text behind it.

    Closing the iterator ends the answer.
    """
    prompt = llm.text.encode_chat(list(messages))
    reasoning, params = reasoning_of(llm.text, prompt, params)
    reader = None if reasoning is None else reasoning.reader()
    for answer in llm.stream(prompt, params, None if reasoning is None else reasoning.marks):
        (output,) = answer.outputs
        yield ("", output.new_text) if reader is None else reader.push(output.new_text)
        if reader is not None and output.finish_reason is not None:
            yield reader.finish(is_cut=output.finish_reason == "length")
