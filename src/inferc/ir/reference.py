"""A runner of lowered Programs by the ops' references: the oracle of tests, certificates and `--target reference`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from msgspec import UNSET
from torch import Tensor, fx

from inferc.errors import VerifyError
from inferc.ir import ops
from inferc.ir.program import Program
from inferc.ir.weights import TensorReader, read_whole

IN_PLACE: dict[Any, Callable[..., Any]] = {
    torch.ops.inferc.dense_write.default: ops.dense_write_in_place,
    torch.ops.inferc.dense_write_attention.default: ops.dense_write_attention_in_place,
    torch.ops.inferc.kv_write.default: ops.kv_write_in_place,
    torch.ops.inferc.latent_write.default: ops.latent_write_in_place,
    torch.ops.inferc.norm_rope_kv_write.default: ops.norm_rope_kv_write_in_place,
    torch.ops.inferc.qkv_rope_kv_write.default: ops.qkv_rope_kv_write_in_place,
    torch.ops.inferc.rope_kv_write.default: ops.rope_kv_write_in_place,
}
ReadWeight = Callable[[str], Tensor]


def weight_reader(program: Program, reader: TensorReader) -> ReadWeight:
    """Return a function that reads weights by name, in their logical layout, each read once and kept."""
    kept: dict[str, Tensor] = {}

    def read(name: str) -> Tensor:
        if name not in kept:
            kept[name] = read_whole(program.weights[name], reader)
        return kept[name]

    return read


def new_kv_caches(program: Program, num_blocks: int | Sequence[int]) -> list[Tensor]:
    """Create one zeroed canonical KV cache per KV group, with `num_blocks` blocks each or a count per group.

    Block 0 is padding.
    """
    counts = [num_blocks] * len(program.kv_groups) if isinstance(num_blocks, int) else num_blocks
    return [
        torch.zeros(
            (count, len(group.layers), group.num_parts, program.block_size, group.num_kv_heads, group.row_size),
            dtype=group.dtype,
        )
        for count, group in zip(counts, program.kv_groups, strict=True)
    ]


@dataclass(frozen=True)
class Chunk:
    """The new tokens of one sequence in a step; `blocks` holds positions [0, num_computed_tokens + new tokens)."""

    token_ids: Sequence[int]
    num_computed_tokens: int
    blocks: Sequence[int]
    slot: int = 0


def step_inputs(
    program: Program, chunks: Sequence[Chunk], caches: list[Tensor], all_rows: bool = True
) -> dict[str, Tensor]:
    """Build the step struct for `chunks` as tensors, asking for the logits of every row or of each chunk's last row."""
    token_ids = [token for chunk in chunks for token in chunk.token_ids]
    positions = [chunk.num_computed_tokens + i for chunk in chunks for i in range(len(chunk.token_ids))]
    ends = torch.tensor([len(chunk.token_ids) for chunk in chunks]).cumsum(0)
    slots = [
        chunk.blocks[position // program.block_size] * program.block_size + position % program.block_size
        for chunk in chunks
        for position in range(chunk.num_computed_tokens, chunk.num_computed_tokens + len(chunk.token_ids))
    ]
    most = max(len(chunk.blocks) for chunk in chunks)
    table = torch.tensor([[*chunk.blocks, *[0] * (most - len(chunk.blocks))] for chunk in chunks], dtype=torch.int32)
    rows = torch.arange(len(token_ids)) if all_rows else ends - 1
    inputs = {
        "token_ids": torch.tensor(token_ids, dtype=torch.int32),
        "positions": torch.tensor(positions, dtype=torch.int64),
        "query_start_loc": torch.cat((torch.zeros(1, dtype=torch.int64), ends)).to(torch.int32),
        "seq_lens": torch.tensor([c.num_computed_tokens + len(c.token_ids) for c in chunks], dtype=torch.int32),
        "seq_slots": torch.tensor([chunk.slot for chunk in chunks], dtype=torch.int32),
        "logits_rows": rows.to(torch.int32),
    }
    for index, cache in enumerate(caches):
        inputs[f"slot_mapping_{index}"] = torch.tensor(slots, dtype=torch.int64)
        inputs[f"block_table_{index}"] = table
        inputs[f"kv_cache_{index}"] = cache
    if program.info.adapters is not UNSET:
        inputs |= no_adapters(len(token_ids))
    return inputs


def no_adapters(num_tokens: int) -> dict[str, Tensor]:
    """Return the inputs of a step whose tokens have no adapter."""
    return {"adapter_ids": torch.zeros(num_tokens, dtype=torch.int32), "adapters": torch.zeros(0, 0)}


def run_step(
    program: Program,
    inputs: dict[str, Tensor],
    read_weight: ReadWeight,
    observe: Callable[[fx.Node, Any], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Run one step; return (hidden [S, hidden_size], logits float32 [S, vocab_size]).

    The caches among `inputs` are written in place.
    """
    with torch.inference_mode():
        hidden, logits = program.run(inputs, read_weight, calls=IN_PLACE, observe=observe)
    return hidden, logits


def uses_dense_cache(program: Program) -> bool:
    """Return whether the program's step reads a dense KV cache of whole sequences (`DenseKVCache`)."""
    return any(node.name == "starts" for node in program.inputs())


def new_dense_caches(program: Program, num_seqs: int, capacity: int) -> dict[str, Tensor]:
    """Create the zeroed caches of a dense program, by input name, each [num_seqs, heads, capacity, head_dim]."""
    return {
        node.name: torch.zeros((num_seqs, value.shape[1], capacity, value.shape[3]), dtype=value.dtype)
        for node in program.inputs()
        if (value := node.meta["val"]).dim() == 4
    }


def dense_inputs(
    token_ids: Sequence[Sequence[int]], starts: Sequence[int], caches: dict[str, Tensor], all_rows: bool = True
) -> dict[str, Tensor]:
    """Build the inputs of one call of a dense program.

    Every sequence gets equally many new tokens, which follow the `starts` tokens that it has cached.
    """
    count, first = len(token_ids[0]), torch.tensor(starts)
    rows = torch.arange(len(starts) * count)
    return {
        "token_ids": torch.tensor([token for each in token_ids for token in each], dtype=torch.int32),
        "positions": (first[:, None] + torch.arange(count)).flatten(),
        "starts": first,
        "seq_lens": first + count,
        "logits_rows": (rows if all_rows else rows[count - 1 :: count]).to(torch.int32),
        **caches,
    }


def run_sequence(
    program: Program, token_ids: Sequence[int], read_weight: ReadWeight, sizes: Sequence[int] | None = None
) -> Tensor:
    """Compute the logits, float32 [T, vocab_size], of one sequence by a program at any stage of lowering.

    sizes: the lengths of the chunks in which a program with a cache computes it, which sum to T; by default one. A
    program without a cache, as captured, computes it as a whole.
    """
    count = len(token_ids)
    if uses_dense_cache(program):
        dense = new_dense_caches(program, 1, count)

        def inputs(start: int, end: int) -> dict[str, Tensor]:
            return dense_inputs([token_ids[start:end]], [start], dense)

    elif program.block_size:
        blocks = range(1, 1 - (-count // program.block_size))  # block 0 is reserved for padding
        paged = new_kv_caches(program, len(blocks) + 1)

        def inputs(start: int, end: int) -> dict[str, Tensor]:
            return step_inputs(program, [Chunk(token_ids[start:end], start, blocks)], paged)

    else:  # inputs are [1, T] as captured, [T] once the batch is flattened
        sizes = None
        known = {"token_ids": torch.tensor(token_ids), "positions": torch.arange(count)}
        dims = {node.name: node.meta["val"].dim() for node in program.inputs()}

        def inputs(start: int, end: int) -> dict[str, Tensor]:
            return {name: value[None] if dims[name] == 2 else value for name, value in known.items() if name in dims}

    parts, start = [], 0
    with torch.inference_mode():
        for size in sizes or [count]:
            logits: Tensor = program.run(inputs(start, start + size), read_weight, calls=IN_PLACE)[-1]
            parts.append(logits.reshape(size, -1).float())
            start += size
    return torch.cat(parts)


class _RankOfBatch:
    """A rank of a partitioned batch: its program, with KV caches of its own."""

    def __init__(self, program: Program, read_weight: ReadWeight, num_blocks: int) -> None:
        self.program, self.read_weight = program, read_weight
        self.caches = new_kv_caches(program, num_blocks)

    def step(self, chunks: Sequence[Chunk], hidden: Tensor | None) -> Tensor:
        """Run one step; return the hidden rows, or on the last stage the logits of every row."""
        inputs = step_inputs(self.program, chunks, self.caches)
        if hidden is not None:
            inputs["hidden_in"] = hidden
        with torch.inference_mode():
            last: Tensor = self.program.run(inputs, self.read_weight, calls=IN_PLACE)[-1]
        return last


def run_partitioned(
    stages: Sequence[Sequence[Program]],
    reader: TensorReader,
    prompts: Sequence[Sequence[int]],
    chunk_size: int,
    read: Callable[[Program, TensorReader], ReadWeight] = weight_reader,
) -> list[Tensor]:
    """Compute the logits [len(prompt), vocab_size] of prompts by the lowered programs of all ranks, stage by stage.

    The prompts run as one batch. stages: for each pipeline stage, its ranks' programs. The ranks of a stage run in
    threads of this process. read: makes a function that reads a program's weights. Raises VerifyError where they return
    different rows.
    """
    longest = max(map(len, prompts))
    width = -(-longest // stages[0][0].block_size)
    num_blocks = 1 + len(prompts) * width
    ranks = [[_RankOfBatch(program, read(program, reader), num_blocks) for program in stage] for stage in stages]
    group = "ep" if isinstance(stages[0][0].info.ep_rank, int) else "tp"
    out: list[list[Tensor]] = [[] for _ in prompts]
    for start in range(0, longest, chunk_size):
        seqs = [seq for seq, prompt in enumerate(prompts) if start < len(prompt)]
        new = [prompts[seq][start : start + chunk_size] for seq in seqs]
        chunks = [
            Chunk(ids, start, range(1 + seq * width, 1 + (seq + 1) * width), seq)
            for seq, ids in zip(seqs, new, strict=True)
        ]
        rows: Tensor | None = None
        for stage in ranks:
            results = ops.run_ranks(group, [partial(rank.step, chunks, rows) for rank in stage])
            if not all(torch.equal(other, results[0]) for other in results[1:]):
                raise VerifyError(f"the ranks of group {group} return different rows; expected equal ones")
            rows = results[0]
        assert rows is not None
        for seq, logits in zip(seqs, rows.split([len(ids) for ids in new]), strict=True):
            out[seq].append(logits)
    return [torch.cat(parts) for parts in out]
