"""The text of a sequence as its tokens come: detokenized, and ended at its stop strings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.text.detokenizer import Detokenizer
from inferc.runtime.text.stop_strings import StopStrings
from inferc.runtime.text.tokenizer import Text


class Delta(NamedTuple):
    """The text of a sequence that became final, and its end if it ended.

    stop: the stop string or the end token that ended it.
    num_tokens: how many of the tokens that were added belong to the sequence; those behind a stop string do not.
    """

    text: str
    finish_reason: str | None = None
    stop: str | int | None = None
    num_tokens: int = 0


class TextStream:
    """The text of one sequence of a request: it detokenizes the outputs and applies the stop strings.

    marks: as in Detokenizer; a stop string that names such a token is found there, too.
    """

    def __init__(self, text: Text, params: SamplingParams, marks: Mapping[int, str] | None = None) -> None:
        self._params = params
        self._detokenizer = Detokenizer(text, params.skip_special_tokens, marks=marks)
        stops = params.stop
        for token, mark in (marks or {}).items() if stops else ():
            name = text.token_bytes(token).decode(errors="replace")
            if token not in text.special_ids or not params.skip_special_tokens:
                stops = (*stops, *(each.replace(name, mark) for each in stops if name in each))
        self._stops = StopStrings(stops, params.include_stop_str_in_output)
        self._count = 0

    def push(self, token_ids: Sequence[int], finish_reason: str | None = None) -> Delta:
        """Add the next ids of the sequence, and return the text that became final.

        If the delta has a finish reason that the engine did not give, the caller must abort the sequence. Tokens that
        come together end at a stop string where they would have ended one by one.
        """
        if len(token_ids) < 2:
            return self._push(token_ids, finish_reason)
        text = ""
        for count, token in enumerate(token_ids, 1):
            delta = self._push((token,), finish_reason if count == len(token_ids) else None)
            text += delta.text
            if delta.finish_reason is not None:
                return delta._replace(text=text, num_tokens=count)
        return Delta(text, num_tokens=len(token_ids))

    def _push(self, token_ids: Sequence[int], finish_reason: str | None) -> Delta:
        ended_by_token = finish_reason == "stop" and bool(token_ids)
        hide_last = ended_by_token and not self._params.include_stop_str_in_output
        piece = self._detokenizer.push(token_ids[:-1] if hide_last else token_ids)
        if finish_reason is not None:
            piece += self._detokenizer.finish()
        self._count += len(token_ids)
        shown, stop = (piece, None) if self._count < self._params.min_tokens else self._stops.push(piece)
        if stop is not None:
            return Delta(shown, "stop", stop, len(token_ids))
        if finish_reason is None:
            return Delta(shown, num_tokens=len(token_ids))
        ended_by = token_ids[-1] if ended_by_token else None
        return Delta(shown + self._stops.finish(), finish_reason, ended_by, len(token_ids))
