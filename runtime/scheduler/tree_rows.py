"""The rows of a step's plan that drafted trees have: a branch is a sequence of its own, behind those of the step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from inferc.runtime.step.plan import I32, I64, Copies, StepPlan, StepTree
from inferc.runtime.step.tree import Line, Tree

Blocks = list[list[int]]
"""The blocks that are lent to a branch, per KV group: those of its tokens, in their order."""


@dataclass(frozen=True)
class PlacedTree:
    """The tree that was drafted for a slot behind `num_known` tokens, with its nodes in the order of its lines.

    blocks: of each line but the first, which is the chain.
    """

    slot: int
    num_known: int
    tree: Tree
    lines: list[Line]
    blocks: list[Blocks]

    @property
    def num_chain(self) -> int:
        return len(self.lines[0].nodes)

    def start(self, line: Line) -> int:
        """Return the position of a line's first token."""
        return self.num_known + len(self.tree.path(line.parent))

    @property
    def end(self) -> int:
        """The number of tokens of the sequence with its longest branch."""
        return max(self.start(line) + len(line.nodes) for line in self.lines)


@dataclass
class TreeRows:
    """The logits rows of the sampled slots of a step with branches; a slot's rows are those of its tree's nodes.

    The rows of a slot begin with the one behind its last known token. places: how many drafted tokens are before each.
    ways: these tokens.
    """

    slots: I64
    places: I64
    logits_rows: I32
    num_drafted: I32
    parents: I32
    ways: list[list[int]]


def rows_of_trees(
    placed: Mapping[int, PlacedTree], slots: I64, last_rows: I32, chains: list[list[int]], num_tokens: int
) -> TreeRows:
    """Return the logits rows of a step.

    slots: those that are sampled; of each, last_rows: the row of its chain's last token, and chains: the drafted tokens
    of its chain. num_tokens: of the step without branches, whose rows come behind them.
    """
    found_slots, places, rows, counts, parents = [], list[int](), list[int](), list[int](), list[int]()
    ways: list[list[int]] = []
    for slot, last, chain in zip(slots.tolist(), last_rows.tolist(), chains, strict=True):
        tree = placed[slot].tree if slot in placed else Tree.chain(chain)
        base, beside = len(rows), len(tree) - len(chain)
        rows += [*range(last - len(chain), last + 1), *range(num_tokens, num_tokens + beside)]
        num_tokens += beside
        own = [tree.path(node) for node in range(-1, len(tree))]
        ways += own
        places += [len(way) for way in own]
        parents += [-1, *(base + 1 + parent for parent in tree.parents)]
        counts.append(len(tree))
        found_slots += [slot] * len(own)
    return TreeRows(
        np.array(found_slots, np.int64),
        np.array(places, np.int64),
        np.array(rows, np.int32),
        np.array(counts, np.int32),
        np.array(parents, np.int32),
        ways,
    )


@dataclass
class _Group:
    """The branches' share of a plan in one KV group: where K and V go, block tables, and what is echoed."""

    mapping: list[int] = field(default_factory=list)
    tables: list[I32] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)

    def add(self, placed: PlacedTree, index: int, base: I32, chain: list[int], size: int) -> None:
        """Add the branches of a slot. index: of the group; base: the slot's block table; chain: its rows' slots."""

        def slots_of(table: I32, start: int, end: int) -> list[int]:
            return [int(table[at // size]) * size + at % size for at in range(start, end)]

        first = placed.num_known - 1  # the position of row 0, which all others are behind
        written = list(chain)  # by row, the slot of its K and V
        tables, line_of = [base], [0] * len(chain)  # by line, and by row the line that has it
        for number, (line, blocks) in enumerate(zip(placed.lines[1:], placed.blocks, strict=True), start=1):
            way, start = _rows_to(placed.tree, line.parent), placed.start(line)
            block, own = start // size, blocks[index]
            table = tables[line_of[line.parent + 1]].copy()
            table[block : block + len(own)] = own
            begin = block * size
            self.sources += slots_of(base, begin, min(start, first))
            self.sources += [written[way[at - first]] for at in range(max(begin, first), start)]
            self.targets += slots_of(table, begin, start)
            new = slots_of(table, start, start + len(line.nodes))
            self.mapping += new
            written += new
            line_of += [number] * len(new)
            tables.append(table)
        self.tables += tables[1:]


def add_branches(plan: StepPlan, placed: Mapping[int, PlacedTree], parents: I32, block_size: int) -> None:
    """Add the branches of a step to its plan, whose logits rows have them already.

    The block tables have room for the longest branch.
    """
    bounds, groups = plan.query_start_loc.tolist(), [_Group() for _ in plan.block_tables]
    ids, positions, lengths, seqs = list[int](), list[int](), list[int](), list[int]()
    for at, slot in enumerate(plan.seq_slots.tolist()):
        if slot not in placed:
            continue
        each = placed[slot]
        own = slice(bounds[at + 1] - 1 - each.num_chain, bounds[at + 1])
        for index, group in enumerate(groups):
            chain = plan.slot_mapping[index][own].tolist()
            group.add(each, index, plan.block_tables[index][at], chain, block_size)
        for line in each.lines[1:]:
            ids += [each.tree.token_ids[node] for node in line.nodes]
            positions += range(each.start(line), each.start(line) + len(line.nodes))
            lengths.append(len(line.nodes))
            seqs.append(at)
    plan.token_ids = np.concatenate((plan.token_ids, np.array(ids, np.int32)))
    plan.positions = np.concatenate((plan.positions, np.array(positions, np.int64)))
    ends = (bounds[-1] + np.cumsum(lengths)).astype(np.int32)
    plan.query_start_loc = np.concatenate((plan.query_start_loc, ends))
    plan.seq_lens = np.append(plan.seq_lens, (plan.positions[ends - 1] + 1).astype(np.int32))
    plan.seq_slots = np.append(plan.seq_slots, plan.seq_slots[seqs])
    if len(plan.adapter_ids):
        plan.adapter_ids = np.append(plan.adapter_ids, plan.adapter_ids[seqs])
    plan.slot_mapping = tuple(
        np.append(mapping, np.array(group.mapping, np.int64))
        for mapping, group in zip(plan.slot_mapping, groups, strict=True)
    )
    plan.block_tables = tuple(
        np.concatenate((table, group.tables)) for table, group in zip(plan.block_tables, groups, strict=True)
    )
    echoes = (Copies(np.array(each.sources, np.int64), np.array(each.targets, np.int64)) for each in groups)
    plan.tree = StepTree(len(lengths), parents, tuple(echoes))


def _rows_to(tree: Tree, node: int) -> list[int]:
    """Return the rows on the way to a node: 0 for the last known token, and for each node the one of its number."""
    found = []
    while node >= 0:
        found.append(node + 1)
        node = tree.parents[node]
    return [0, *found[::-1]]
