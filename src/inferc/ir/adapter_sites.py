"""The places of a step where LoRA adapters add to a product, as a pass finds them and an artifact keeps them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from inferc.manifest_types import Count, Positive, Small


class IndexRun(Struct, frozen=True, array_like=True):
    """Indices of equal steps: `count` of them from `first` on; a `first` of -1 with the step 0 is padding."""

    first: int
    count: Positive
    step: int


class AdapterSite(Struct, frozen=True, omit_defaults=True):
    """A place where an adapter adds to a product, or to some columns of one, or to an embedding.

    module: the name of the stored matrix without `.weight`, whose outputs and inputs are `stored`; outputs and inputs:
    how many the compiled matrix has, and which of the stored ones these are; None: those of the same number.
    begin: the first column that the adapter adds to.
    """

    kind: Literal["linear", "embedding"]
    module: str
    layer: Small | None
    stored: Annotated[list[Positive], Meta(min_length=2, max_length=2)]
    num_outputs: Positive
    num_inputs: Positive
    begin: Count = 0
    outputs: list[IndexRun] | None = None
    inputs: list[IndexRun] | None = None


class Adapters(Struct, frozen=True):
    """The room that a step has for LoRA adapters: the largest rank, and the sites by their numbers."""

    rank: Positive
    sites: list[AdapterSite]
