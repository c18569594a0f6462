"""The reasoning of a request's answers, told from their text as it comes, and counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from inferc.runtime.openai.reasoning import Shown
from inferc.runtime.reasoning.channels import ChannelCount, ChannelReader
from inferc.runtime.reasoning.reader import ReasoningCount, ReasoningReader
from inferc.runtime.reasoning.reasoning import Reasoning
from inferc.serve.models.streams import Delta


class ReasoningApart:
    """The readers of the choices of one request, whose prompt leaves the reasoning of each as `reasoning` says.

    as_it_grows: parts of reasoning are handed on as they come; otherwise all of it once it ended.
    """

    def __init__(self, reasoning: Reasoning, shown: Shown, as_it_grows: bool = True) -> None:
        self._reasoning = replace(reasoning, is_within=shown == "in_text")
        self._shown, self._as_it_grows = shown, as_it_grows
        self._held: dict[int, str] = {}  # the reasoning of choices whose reasoning has not ended
        self._readers: dict[int, ReasoningReader | ChannelReader] = {}
        self._counts: dict[int, ReasoningCount | ChannelCount] = {}

    @property
    def marks(self) -> Mapping[int, str] | None:
        """The characters that streams write for markers that are tokens; None: they write them as other tokens."""
        return self._reasoning.marks if self._reasoning.is_read else None

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all choices' reasoning so far."""
        return sum(each.count for each in self._counts.values())

    def num_before(self, index: int, is_whole: bool = False) -> int | None:
        """Return how many tokens of a choice stand before its text, None if more may come; is_whole: none will."""
        if self._shown == "in_text" or index not in self._counts:
            return 0
        count = self._counts[index]
        return count.num_before if is_whole or count.is_over else None

    def of(self, index: int, delta: Delta) -> Delta:
        """Return a delta of choice `index` with its reasoning apart, as the request wants to see it."""
        if index not in self._counts:
            self._counts[index], self._readers[index] = self._reasoning.count(), self._reasoning.reader()
        self._counts[index].push(delta.token_ids)
        if not self._reasoning.is_read:
            return delta
        reader = self._readers[index]
        thought, text = reader.push(delta.text)
        if delta.finish_reason is not None:
            more, last = reader.finish(is_cut=delta.finish_reason == "length")
            thought, text = thought + more, text + last
        if not self._as_it_grows:
            held = self._held.get(index, "") + thought
            is_over = reader.is_over or delta.finish_reason is not None
            thought, self._held[index] = (held, "") if is_over else ("", held)
        return replace(delta, text=text, reasoning=thought if self._shown == "apart" else "")
