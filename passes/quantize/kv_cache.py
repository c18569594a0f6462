"""Store K and V in int8: each head's row of a token gets a float32 scale and is rounded to nearest when it is written.

The ops of the cache stay the same; the cache gets another dtype, with rows of `row_size` bytes: head_dim integers and
the scale. Decoding over a long context then reads about half the bytes of bfloat16, and the same memory holds nearly
twice the tokens. A latent gets one scale for the whole row of a token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from inferc.ir.program import Program
from inferc.passes.rewrite import infer_types
from inferc.passes.verify import type_text


@dataclass(frozen=True)
class QuantizeKVCache:
    """A pass that quantizes the KV cache, and returns the number of cache writes.

    It runs after `page_kv_cache`, while each cache write is an op of its own.
    """

    name: str = "quantize_kv_cache"

    def __call__(self, program: Program) -> int:
        caches = {node for node in program.inputs() if node.name.startswith("kv_cache_")}
        caches = {node for node in caches if node.meta["val"].dtype != torch.int8}
        program.kv_groups = tuple(replace(group, dtype=torch.int8) for group in program.kv_groups)
        for node in caches:
            group = program.kv_groups[int(node.name.removeprefix("kv_cache_"))]
            node.meta["val"] = program.fake((*node.meta["val"].shape[:-1], group.row_size), group.dtype)
        count = 0
        for node in program.graph.nodes:
            if node.op != "call_function" or caches.isdisjoint(node.all_input_nodes):
                continue
            before = type_text(node.meta["val"])
            infer_types(program, [node])
            if type_text(node.meta["val"]) != before:  # the node returns the cache, which other nodes read
                caches.add(node)
                count += 1
        return count
