"""A served model as one of its adapters answers, for requests that name the adapter as their model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from inferc.errors import RequestError
from inferc.runtime.engine.beam_search import BeamSearchParams
from inferc.runtime.engine.scoring import Score
from inferc.runtime.step.sampling_params import SamplingParams, changed
from inferc.serve.models.adapters import ServedAdapter
from inferc.serve.models.served_model import ServedModel
from inferc.serve.models.streams import Kind, Stream


class AdaptedModel(ServedModel):
    """A view of a served model, with which it shares everything, whose requests have an adapter."""

    def __init__(self, model: ServedModel, adapter: ServedAdapter) -> None:
        self.__dict__.update(model.__dict__)
        self.base_name, self.adapter = model.name, adapter
        self.info = replace(model.info, name=adapter.name, created=adapter.created)

    @property
    def name(self) -> str:
        return self.adapter.name

    @property
    def embeds(self) -> bool:
        return False

    def open(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str = "",
        news: asyncio.Event | None = None,
        kind: Kind = "completion",
        marks: Mapping[int, str] | None = None,
        beams: BeamSearchParams | None = None,
    ) -> Stream:
        """Start a request with the adapter, as ServedModel.open does."""
        named = changed(params, adapter=self.adapter.name)
        return super().open(prompt_token_ids, named, request_id, news, kind, marks, beams)

    async def score(
        self,
        token_ids: Sequence[int],
        num_top: int,
        request_id: str = "",
        cache_salt: str = "",
        n: int = 1,
        first: int = 1,
        adapter: str = "",
    ) -> Score:
        """Score a text with the adapter, as ServedModel.score does."""
        return await super().score(token_ids, num_top, request_id, cache_salt, n, first, self.adapter.name)

    async def embed(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Refuse, with RequestError: vectors are made by models as they are."""
        raise RequestError(f"model {self.name} is an adapter, which makes no vectors; name {self.base_name}")
