"""The detection of sequences in a step that share a prefix, so that its keys and values are read once for several.

The prefix cache and forks share blocks: the tables of such sequences begin with the same blocks. Reading them once
costs extra launches in every layer, which pay off only if enough reads are saved.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from inferc.runtime.step.plan import I32, StepPlan

LEAST_SAVED_BYTES = 16 << 20  # per layer; reading this from an H100's L2 takes about as long as two launches


@dataclass(frozen=True)
class SharedPrefixes:
    """The groups of decoding sequences that share a prefix: members[starts[g]:starts[g + 1]] share keys[g] keys.

    shared: for each sequence of the step, the number of keys that its group shares.
    """

    members: I32
    starts: list[int]
    keys: list[int]
    shared: I32


def shared_prefixes(
    plan: StepPlan, group: int, block_size: int, most_members: int, unit: int, layer_bytes: int
) -> SharedPrefixes | None:
    """Return the shared prefixes of a KV group, or None if reading them once does not pay off.

    unit: every number of shared keys is a multiple of it; layer_bytes: the bytes of one token's K and V in a layer. A
    prefix may be shorter than what two of its members share: it is what all sequences with the same first block share.
    """
    table = plan.block_tables[group]
    decoding = np.flatnonzero(np.diff(plan.query_start_loc) == 1)
    if len(decoding) < 2 or not table.shape[1]:
        return None
    first = table[decoding, 0]
    if len(set(first.tolist())) == len(first):
        return None
    order = np.argsort(first, kind="stable")
    ends = np.flatnonzero(np.append(np.diff(first[order]) != 0, True)) + 1
    members: list[I32] = []
    starts, keys, saved, begin = [0], [], 0, 0
    shared = np.zeros(plan.num_seqs, np.int32)
    for end in ends.tolist():
        alike, begin = decoding[order[begin:end]], end
        if len(alike) < 2:
            continue
        own = table[alike]
        same = (own == own[0]).all(0)
        blocks = len(same) if same.all() else int(same.argmin())
        # At least one key of each sequence, that of its new token, is not shared.
        count = min(blocks * block_size, int(plan.seq_lens[alike].min()) - 1) // unit * unit
        for at in range(0, len(alike), most_members) if count else ():
            some = alike[at : at + most_members]
            if len(some) > 1:
                members.append(some.astype(np.int32))
                starts.append(starts[-1] + len(some))
                keys.append(count)
                shared[some] = count
                saved += (len(some) - 1) * count
    if not saved or saved * layer_bytes < LEAST_SAVED_BYTES:
        return None
    return SharedPrefixes(np.concatenate(members), starts, keys, shared)
