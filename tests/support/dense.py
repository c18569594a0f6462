"""Small programs over a dense KV cache, run for two sequences at once or apart."""

from __future__ import annotations

import onnxruntime
import torch
from graphs import TOKENS, Example
from paged import IDS

from inferc.ir.reference import IN_PLACE, dense_inputs, new_dense_caches

PROMPT = IDS["token_ids"].tolist()
OTHER = [6, 2, 2, 0, 3]
CAPACITY = 8


def as_captured(made: Example) -> torch.Tensor:
    """Rows of both sequences by the captured program, which knows one from its beginning; [2, TOKENS, …]."""
    others = {name: value for name, value in made.inputs.items() if name not in IDS}
    found = []
    for ids in (PROMPT, OTHER):
        inputs = {**others, "token_ids": torch.tensor(ids), "positions": torch.arange(len(ids))}
        (rows,) = made.program.run(inputs, made.reader.tensors.__getitem__)
        assert isinstance(rows, torch.Tensor)
        found.append(rows)
    return torch.stack(found)


def run_dense(
    made: Example, chunk_size: int, session: onnxruntime.InferenceSession | None = None, apart: bool = False
) -> torch.Tensor:
    """Run prompts through a dense cache in calls of `chunk_size` tokens, of both sequences or of one of them."""
    others = {name: value for name, value in made.inputs.items() if name not in IDS}
    found = []
    for texts in ((PROMPT,), (OTHER,)) if apart else ((PROMPT, OTHER),):
        caches = new_dense_caches(made.program, len(texts), CAPACITY)
        for cache in caches.values():
            cache.fill_(1e4)  # what must not be seen; not a NaN, as onnxruntime multiplies what is masked by 0
        parts = []
        for start in range(0, TOKENS, chunk_size):
            new = [ids[start : start + chunk_size] for ids in texts]
            inputs = dense_inputs(new, [start] * len(texts), caches)
            for name, value in others.items():  # a row for each token of each
                inputs[name] = value[start : start + chunk_size].repeat(len(texts), *[1] * (value.dim() - 1))
            if session is None:
                (rows,) = made.program.run(inputs, made.reader.tensors.__getitem__, calls=IN_PLACE)
            else:
                wanted = {each.name for each in session.get_inputs()}
                arrays = {name: value.numpy() for name, value in inputs.items() if name in wanted}
                names = [each.name for each in session.get_outputs()]
                results = dict(zip(names, session.run(names, arrays), strict=True))
                rows = torch.from_numpy(results["out0"])
                caches = {name: torch.from_numpy(results[f"{name}.out"]) for name in caches}
            parts.append(rows.view(len(texts), -1, *rows.shape[1:]))
        found.append(torch.cat(parts, 1))
    return torch.cat(found)
