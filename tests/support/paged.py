"""Small programs with attention, for the tests of the passes around the paged cache."""

from __future__ import annotations

from typing import Any

import torch
from graphs import TOKENS, Example, example, random, rows

from inferc.ir.reference import IN_PLACE, Chunk, new_kv_caches, step_inputs

aten, inferc = torch.ops.aten, torch.ops.inferc
IDS = {"token_ids": torch.tensor([3, 1, 4, 1, 5]), "positions": torch.arange(TOKENS)}


def attend(x: Any, layer: int, mask: str, window: int, head_dim: int) -> Any:
    """4 query heads over 2 KV heads, from rows of 4 heads."""
    q = aten.view.default(x, [-1, 4, head_dim])
    k = aten.view.default(aten.slice.Tensor(x, -1, 0, 2 * head_dim), [-1, 2, head_dim])
    v = aten.view.default(aten.slice.Tensor(x, -1, 2 * head_dim, 4 * head_dim), [-1, 2, head_dim])
    out = inferc.attention.default(q, k, v, None, 0.5, mask, window, 0.0)
    out.node.meta["at"] = layer
    return aten.view.default(out, [-1, 4 * head_dim])


def model(*kinds: tuple[str, int], head_dim: int = 4) -> Example:
    def graph(token_ids: Any, positions: Any, embed: Any) -> Any:
        x = aten.embedding.default(embed, token_ids)
        for layer, (mask, window) in enumerate(kinds):
            x = attend(x, layer, mask, window, head_dim)
        return x

    made = example(graph, IDS, {"embed": random(7, 4 * head_dim)})
    for node in made.program.graph.nodes:
        if "at" in node.meta:
            node.meta["layer"] = node.meta["at"]
    return made


def sharing(
    *masks: tuple[str, int], is_computed_again: bool = False, scale_v: float | None = None, head_dim: int = 4
) -> Example:
    """Attentions over the K and V of the first layer, each with queries and a mask of its own."""

    def graph(token_ids: Any, positions: Any, embed: Any, table: Any) -> Any:
        x = aten.embedding.default(embed, token_ids)

        def kv() -> tuple[Any, Any]:
            width = 2 * head_dim
            k = aten.view.default(aten.slice.Tensor(x, -1, 0, width), [-1, 2, head_dim])
            k = inferc.rope.default(k, table)
            return k, aten.view.default(aten.slice.Tensor(x, -1, width, 2 * width), [-1, 2, head_dim])

        k, v = kv()
        out, hidden = x, []
        for index, (mask, window) in enumerate(masks):
            if index and is_computed_again:
                k, v = kv()
            if index and scale_v is not None:
                v = aten.mul.Tensor(v, scale_v)
            q = inferc.rope.default(aten.view.default(out, [-1, 4, head_dim]), table)
            attended = inferc.attention.default(q, k, v, None, 0.5, mask, window, 0.0)
            out = aten.mul.Tensor(aten.view.default(attended, [-1, 4 * head_dim]), 1.5)
            hidden.append(out)
        return aten.cat.default(hidden, -1)

    made = example(graph, {**IDS, "table": rows(head_dim, seed=5)}, {"embed": random(7, 4 * head_dim)})
    for index, node in enumerate(node for node in made.program.graph.nodes if node.name.startswith("attention")):
        node.meta["layer"] = index
    return made


def run_paged(made: Example, chunk_size: int) -> torch.Tensor:
    """The rows of the one result, computed in steps of `chunk_size` tokens; other inputs have a row per token."""
    program, ids = made.program, IDS["token_ids"].tolist()
    caches = new_kv_caches(program, num_blocks=4)
    others = {name: value for name, value in made.inputs.items() if name not in IDS}
    results: list[torch.Tensor] = []
    weights = made.reader.tensors.__getitem__
    for start in range(0, TOKENS, chunk_size):
        chunk = Chunk(ids[start : start + chunk_size], start, [2, 3, 1])
        inputs = {name: value[start : start + chunk_size] for name, value in others.items()}
        results += program.run({**step_inputs(program, [chunk], caches), **inputs}, weights, calls=IN_PLACE)
    return torch.cat(results)
