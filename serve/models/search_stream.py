"""The stream of a beam search: a request of one token for each beam and step, and whole answers at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from inferc.errors import InfercError
from inferc.runtime.engine.beam_search import BeamSearchParams, Likely, begin
from inferc.runtime.engine.loop import Event, Sink
from inferc.runtime.step.sampling_params import SamplingParams, changed
from inferc.runtime.step.sequence import Output
from inferc.serve.models.streams import EngineLike, ModelFacts, Stream


class SearchStream(Stream):
    """A stream whose outputs are the `n` best answers of a beam search, which come when it is done, the best first.

    Between two steps no request of it is in the engine. If the engine dies, the search goes on from its last step.
    """

    def __init__(
        self,
        engine: Any,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        beams: BeamSearchParams,
        facts: ModelFacts,
        request_id: str,
        **of_stream: Any,
    ) -> None:
        """Create a search that has not been started; of_stream: as in Stream.

        Raises RequestError if a step of it would need more likely tokens than the engine tells.
        """
        super().__init__(engine, prompt_token_ids, params, request_id, **of_stream)
        length = facts.max_model_len if params.max_tokens is None else params.max_tokens
        beams = replace(
            beams,
            max_tokens=length,
            ignore_eos=params.ignore_eos,
            stop_token_ids=params.stop_token_ids,
            cache_salt=params.cache_salt,
        )
        self._search, step = begin(prompt_token_ids, beams, facts.eos_token_ids, facts.max_model_len)
        names = ("client", "priority", "cache_priority", "adapter")
        self._step = changed(step, **{name: getattr(params, name) for name in names})
        self.num_sequences = beams.beam_width
        self._beam_of: dict[str, int] = {}  # by the engine's id of a request, the beam whose next tokens it tells
        self._rows: dict[int, Likely] = {}
        self._client: EngineLike | None = None
        self._sink: Sink | None = None
        self._is_first = True

    def start(self, client: EngineLike, sink: Sink) -> None:
        """Begin the present step of the search on an engine, which may be another one than before."""
        self._client, self._sink, self._beam_of, self._rows = client, sink, {}, {}
        try:
            for beam, text in enumerate(self._search.texts):
                self._beam_of[client.add(text, self._step, sink, self.request_id)] = beam
        except InfercError:
            self._beam_of = {}
            raise

    def abort_on(self, client: EngineLike, index: int | None = None) -> None:
        """Abort the present step; the outputs have no requests of their own."""
        asked, self._beam_of = self._beam_of, {}
        for engine_id in asked:
            client.abort(engine_id)

    def fail(self, error: InfercError) -> None:
        """End the search, of which one beam may have failed; the others are aborted."""
        if self.is_open:
            self._engine.abort_in_engine(self)
        super().fail(error)

    def take_event(self, event: Event, now: float) -> None:
        if not isinstance(event, Output) or not self.is_open:
            return
        if (beam := self._beam_of.pop(event.request_id, None)) is None or not event.logprobs:
            return
        self._rows[beam] = event.logprobs[0].top
        if self._is_first and event.num_cached is not None:
            self.num_cached, self._queue_seconds, self._is_first = event.num_cached, event.queue_seconds, False
        if self._beam_of:
            return
        self._search.step([row for _, row in sorted(self._rows.items())])
        if self._search.is_done:
            for index, found in enumerate(self._search.found[: self._params.n]):
                self.push(Output("", index, list(found.token_ids), found.finish_reason), now)
            return
        assert self._client is not None and self._sink is not None, "a step of it was begun"
        if self._client.stopped is None:
            try:
                self.start(self._client, self._sink)
            except InfercError:  # the engine has died just now
                self._engine.start_again(self)
        else:
            self._engine.start_again(self)
