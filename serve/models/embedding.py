"""The embedding vectors of several texts at once, for the HTTP and the gRPC interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inferc.errors import RequestError
from inferc.serve.models.long_texts import in_text_thread
from inferc.serve.models.served_model import ServedModel


@dataclass(frozen=True)
class Vectors:
    """The embedding vectors of a request, [inputs, dimensions], and the number of tokens that were read for them."""

    values: NDArray[np.float32]
    num_tokens: int


async def embed(model: ServedModel, inputs: Sequence[str | list[int]], dimensions: int | None = None) -> Vectors:
    """Return the embedding vector of each input, cut to `dimensions`, and normalized again if the model normalizes.

    The caller has checked that the model embeds (`check_embeds`), and the number of inputs and of dimensions. Raises
    RequestError, and the same errors as ServedModel.embed.
    """
    for each in inputs:
        if not isinstance(each, str):
            model.check_length(len(each), room=0)
    of_texts = iter(await model.encode_all([each for each in inputs if isinstance(each, str)]))
    ids = [next(of_texts) if isinstance(each, str) else each for each in inputs]
    rows = await model.embed(ids)
    values = await in_text_thread(lambda: np.stack([np.array(each, np.float32) for each in rows]))
    if dimensions is not None:
        if dimensions > values.shape[1]:
            raise RequestError(f"dimensions is {dimensions}; the model's vectors have {values.shape[1]}")
        values = values[:, :dimensions]
        if model.pooling is not None and model.pooling.normalize:
            values = values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-12)
    return Vectors(values, sum(map(len, ids)))


def check_embeds(model: ServedModel) -> None:
    """Raise RequestError for a model that makes no vectors.

    Either it is no embedding model, or it was compiled for a target that makes none.
    """
    if model.embeds:
        return
    if model.artifact.model.pooling is None:
        raise RequestError(
            f"input: model {model.name} makes no vectors of texts, it generates text; use a model that was made for it"
        )
    target, ranks = model.artifact.manifest.targets[0], len(model.artifact.ranks)
    found = f"target {target}" if ranks == 1 else f"target {target} in {ranks} ranks"
    raise RequestError(
        f"input: model {model.name} was made for vectors of texts, but compiled for {found} it makes none:"
        " that takes the cpu target in one rank, and a last norm whose rows are floating-point numbers"
    )
