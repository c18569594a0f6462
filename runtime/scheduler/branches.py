"""The branches of drafted trees: the blocks that are lent to them, and what becomes of their K and V.

The chain of a tree, its likeliest tokens, is computed in the blocks of its sequence. A branch gets blocks of its own
for its tokens, which are lent to it until its step has landed. If the model chose a branch, K and V of the chosen
tokens are copied to the blocks of the sequence before the next step computes anything; until then they count as not
computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inferc.runtime.kv_cache.manager import KVCacheManager
from inferc.runtime.scheduler.batch import Batch
from inferc.runtime.scheduler.tree_rows import Blocks, PlacedTree
from inferc.runtime.step.plan import I64, Copies, StepPlan
from inferc.runtime.step.tree import Tree


@dataclass(frozen=True)
class _Move:
    """The K and V of a slot's tokens from position `start` on, which a step left in these slots of each KV group."""

    slot: int
    start: int
    sources: list[I64]
    blocks: list[Blocks]


class Branches:
    """The branches of a batch's trees, from a schedule to the step after the one that computes them."""

    def __init__(self, batch: Batch, cache: KVCacheManager) -> None:
        self._batch, self._cache = batch, cache
        self._placed: dict[int, PlacedTree] = {}  # by slot, those of the step that is being scheduled
        self._computed: dict[int, PlacedTree] = {}  # by slot, those of the step in flight
        self._moves: dict[int, _Move] = {}  # by slot, those of the next step

    def place(self, slot: int, tree: Tree) -> list[int]:
        """Lend blocks to the branches of a slot's tree, and return its chain; a branch without blocks is left out."""
        cache, known = self._cache, int(self._batch.num_known[slot])
        tree, lines = tree.in_lines()
        if len(lines) < 2:
            return tree.token_ids
        keeps, lent = [True] * len(tree), list[Blocks]()
        whole = PlacedTree(slot, known, tree, lines, [])
        for line in lines[1:]:
            start, end = whole.start(line), whole.start(line) + len(line.nodes)
            count = (end - 1) // cache.block_size - start // cache.block_size + 1
            spare = min(cache.num_free) - len(self._batch.order)  # beside one more for each running sequence
            if count <= spare and (line.parent < 0 or keeps[line.parent]):
                lent.append(cache.lend(count))
            else:
                keeps[line.nodes.start : line.nodes.stop] = [False] * len(line.nodes)
        tree, lines = tree.kept(keeps).in_lines()
        assert len(lines) == 1 + len(lent), "a line of each branch that got blocks"
        if lent:
            self._placed[slot] = PlacedTree(slot, known, tree, lines, lent)
        return tree.token_ids[: len(lines[0].nodes)]

    def drop(self, slot: int) -> None:
        """Forget the branches that were placed for a slot, and what its next step would have copied."""
        if (placed := self._placed.pop(slot, None)) is not None:
            self._give_back(placed.blocks)
        if (move := self._moves.pop(slot, None)) is not None:
            self._batch.num_computed[slot] = move.start
            self._give_back(move.blocks)

    def take(self, slots: I64) -> dict[int, PlacedTree]:
        """Return the branches of a step over these slots, which is being planned."""
        self._computed = {slot: self._placed.pop(slot) for slot in slots.tolist() if slot in self._placed}
        assert not self._placed, "a sequence that is not in the step was dropped"
        return self._computed

    # ------------------------------------------------------------------------------------------- afterwards

    def landed(self) -> None:
        """Give back the blocks of the landed step's branches, but for those whose tokens were chosen."""
        for placed in self._computed.values():
            self._give_back(placed.blocks)
        self._computed = {}

    def choose(self, slot: int, plan: StepPlan, rows: Sequence[int]) -> None:
        """Note that the tokens of these logits rows were chosen for a running sequence, each behind the one before.

        What lies in the blocks of branches is copied by the next step; the batch counts it as not computed until then.
        """
        tokens = plan.logits_rows[list(rows)].tolist()
        first = int(plan.query_start_loc[plan.num_seqs - plan.num_branches])
        beside = [token for token in tokens if token >= first]
        if not beside:
            return
        placed = self._computed.pop(slot)
        start = placed.num_known - 1 + len(tokens) - len(beside)
        sources = [mapping[beside] for mapping in plan.slot_mapping]
        self._moves[slot] = _Move(slot, start, sources, placed.blocks)
        self._batch.num_computed[slot] = start

    def begin(self) -> None:
        """Count as computed what the step that is scheduled next copies first."""
        for move in self._moves.values():
            self._batch.num_computed[move.slot] = move.start + len(move.sources[0])

    @property
    def moving(self) -> list[int]:
        """The slots whose last tokens the step that is being scheduled copies first."""
        return list(self._moves)

    def take_moves(self) -> tuple[Copies, ...]:
        """Return the copies of the planned step, by group; () if there are none."""
        moves, self._moves = list(self._moves.values()), {}
        size, groups = self._cache.block_size, []
        for index, table in enumerate(self._cache.tables if moves else ()):
            sources, targets = [], []
            for move in moves:
                positions = np.arange(move.start, move.start + len(move.sources[index]))
                blocks = table[move.slot, positions // size].astype(np.int64)
                is_kept = blocks > 0  # the others are outside of a window already
                sources.append(move.sources[index][is_kept])
                targets.append((blocks * size + positions % size)[is_kept])
            groups.append(Copies(np.concatenate(sources), np.concatenate(targets)))
        for move in moves:  # a step that gets these blocks runs after this one
            self._give_back(move.blocks)
        return tuple(groups)

    def _give_back(self, lent: list[Blocks]) -> None:
        for blocks in lent:
            self._cache.take_back(blocks)
