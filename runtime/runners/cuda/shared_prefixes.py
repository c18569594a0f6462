"""Which sequences of a step share a prefix, so that its keys and values are read once for several of them.

Blocks are shared by the prefix cache and by forks: sequences whose tables begin with the same blocks. Reading them once
costs launches of its own in every layer, which pay where enough is not read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from inferc.runtime.step.plan import I32, StepPlan

LEAST_SAVED_BYTES = 16 << 20  # a layer: at the rate of an H100's L2, about what two launches take


@dataclass(frozen=True)
class SharedPrefixes:
    """Groups of sequences that decode: group g is members[starts[g]:starts[g + 1]], which share keys[g] keys.

    shared: for each sequence of the step, how many keys its group does.
    """

    members: I32
    starts: list[int]
    keys: list[int]
    shared: I32


def shared_prefixes(
    plan: StepPlan, group: int, block_size: int, most_members: int, unit: int, layer_bytes: int
) -> SharedPrefixes | None:
    """Of a KV group, if they are worth it.

    unit: of what number of keys each is a multiple; layer_bytes: of a token's K and V in a layer. A prefix may be shorter than
    what two members share: it is what all share whose first block is the same.
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
        # Of each sequence a key is left: the new token's own.
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
