"""The cases of attention over prefixes that sequences share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from attention_cases import LAYER, Groups, Step, inputs, of_plan
from torch import Tensor
from triton_cases import BF16, F16, F32, SUMS, TOLERANCE, UNTOUCHED, Case, behind

from inferc.codegen.triton.kernels.attention_decode import (
    decode_attention,
    prefix_attention,
    prefix_members,
    prefix_rows,
)
from inferc.codegen.triton.kernels.attention_tiles import decode_rows
from inferc.ir.ops.attention import loaded_rows

SHARING: tuple[tuple[Step, Groups], ...] = (
    (Step(((1, 200), (1, 300), (1, 131), (1, 193)), heads=4, kv_heads=2), (((2, 0, 1), 128),)),
    (
        Step(((1, 700), (3, 40), (1, 641), (1, 99), (1, 513), (1, 513)), BF16, heads=2, dim=64, has_sinks=True),
        (((0, 2), 640), ((4, 5), 512)),
    ),
    (Step(((1, 300),) * 9 + ((1, 70),), F16, heads=8, dim=32, softcap=30.0), (((8, 1, 2, 3, 4, 5, 6, 7), 256),)),
    (Step(((1, 600), (1, 580)), heads=4, kv_heads=2, int8_kv=True, num_programs=3), (((1, 0), 576),)),
    (Step(((1, 90), (1, 80)), F16, dim=256), (((0, 1), 64),)),
)


def prefix_cases() -> Iterator[Case]:
    """Yield, for steps with shared prefixes, the kernel's sums over the shared keys, and decode's use of them."""
    for step, groups in SHARING:
        tensors, result, cache = inputs(step, groups)
        shared = torch.zeros(len(step.seqs), dtype=torch.int32)
        for members, keys in groups:
            assert len(members) <= prefix_members(step.group, step.dim, step.int8_kv)
            shared[list(members)] = keys
        of_all = [seq for members, _ in groups for seq in members]
        starts = torch.tensor([0, *(len(of_group) for of_group, _ in groups)]).cumsum(0)
        lengths = torch.tensor([keys for _, keys in groups], dtype=torch.int32)
        of_groups = {
            **{name: value for name, value in tensors.items() if name not in ("out_ptr", "seq_lens_ptr")},
            **of_plan(_line(step, lengths), prefix_rows(step.group, step.dim, step.int8_kv), step),
            "seq_lens_ptr": lengths,
            "members_ptr": torch.tensor(of_all, dtype=torch.int32),
            "member_start_ptr": starts.to(torch.int32),
            "prefix_ptr": torch.full((len(step.seqs), step.heads, step.dim + 2), UNTOUCHED),
        }
        made = torch.stack([_of_prefix(step, tensors, cache, seq, int(keys)) for seq, keys in enumerate(shared)])
        source = prefix_attention(step.shape(), step.num_programs)
        # Sums that nothing divides, in two orders; otherwise the weights are rounded.
        roundings = 2 * SUMS if step.dtype == F32 else int(3 * TOLERANCE[step.dtype] / TOLERANCE[F32])
        counts = {"num_seqs": len(groups)}
        yield Case(f"{step.name} prefix", source, of_groups, {"prefix_ptr": made}, counts, roundings)
        behind_it = {
            **tensors,
            **of_plan(_line(step, step.lengths - shared), decode_rows(step.group), step),
            "shared_ptr": shared,
            "prefix_ptr": made.clone(),
        }
        source = decode_attention(step.shape(), step.num_programs, has_shared=True)
        expected = {"out_ptr": behind(result)}
        yield Case(step.name, source, behind_it, expected, step.counts, SUMS if step.dtype == F32 else 1)


def _line(step: Step, keys: Tensor) -> Tensor:
    """The plan of sequences, or groups, of so many keys each."""
    starts = [0, *((keys + 63) // 64).cumsum(0).tolist()]
    stretch = max(4, -(-starts[-1] * step.kv_heads // step.num_programs))
    return torch.tensor([stretch, *starts], dtype=torch.int32)


def _of_prefix(step: Step, tensors: dict[str, Tensor], cache: Tensor, seq: int, keys: int) -> Tensor:
    """A sequence's sums of values, largest scores and totals [heads, dim + 2] over its first keys.

    Scores as powers of 2.
    """
    if not keys:
        return torch.full((step.heads, step.dim + 2), UNTOUCHED)
    blocks = tensors["block_table_ptr"][seq, : keys // step.block_size].long()
    pair = loaded_rows(cache[blocks, LAYER]).transpose(0, 1).flatten(1, 2)  # [2, keys, kv heads, dim]
    k, v = pair.repeat_interleave(step.group, 2).transpose(1, 2)
    q = tensors["q_ptr"][int(step.starts[seq])].float().view(step.heads, 1, step.dim)
    scores = (q @ k.transpose(1, 2)).squeeze(1) * step.scale
    if step.softcap:
        scores = torch.tanh(scores / step.softcap) * step.softcap
    top = scores.amax(1, keepdim=True)
    weights = (scores - top).exp()
    sums = (weights[:, None] @ v).squeeze(1)
    return torch.cat((sums, top / math.log(2), weights.sum(1, keepdim=True)), 1)


KERNELS: dict[str, Callable[[], Iterator[Case]]] = {"prefix_attention": prefix_cases}
"""The cases of each kernel."""
