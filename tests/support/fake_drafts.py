"""Drafts whose right tokens are known beforehand, of any length and with any share of wrong tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from inferc.runtime.scheduler.batch import Batch
from inferc.runtime.speculation.drafter import NOTHING, Drafter, Offer
from inferc.runtime.speculation.speculation import Reserve, Speculation
from inferc.runtime.step.sequence import Sequence as Seq
from inferc.runtime.step.tree import Tree

# Returns as many tokens as asked for that a sequence would get next.
Continue = Callable[[Seq, list[int], int], list[int]]


class ScriptedDrafter(Drafter):
    """A drafter that knows what a sequence gets next, and drafts a wrong token with the probability 1 - `right`."""

    def __init__(self, go_on: Continue, vocab_size: int, right: float = 0.8, seed: int = 0, most: int = 7) -> None:
        self.random = random.Random(seed)
        self._go_on, self._vocab_size, self.right, self._most = go_on, vocab_size, right, most
        self.branching = 0.0  # the share of tokens of other branches among those of a tree

    def offers(self, batch: Batch, slots: Sequence[int]) -> list[Offer]:
        return [Offer(self._most, 0, self.right) if self._most else NOTHING for _ in slots]

    def draft(self, batch: Batch, slots: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
        return [self.draft_one(batch, slot, count) for slot, count in zip(slots, counts, strict=True)]

    def draft_one(self, batch: Batch, slot: int, count: int) -> list[int]:
        seq = batch.seqs[slot]
        assert seq is not None
        known = batch.tokens[slot, : batch.num_known[slot]].tolist()
        ids = self._go_on(seq, known, count)
        return [
            token if self.random.random() < self.right else self.random.randrange(self._vocab_size) for token in ids
        ]

    def draft_tree(self, batch: Batch, slot: int, count: int) -> Tree:
        """Draft a tree of up to `count` tokens, whose branches start beside the scripted tokens and anywhere else."""
        ids = self.draft_one(batch, slot, count)
        if self.branching == 0.0:
            return Tree.chain(ids)
        tree = Tree()
        on_way = -1  # the node of the scripted tokens so far
        while len(tree) < count and ids:
            is_other = self.random.random() < self.branching
            parent = self.random.randrange(-1, len(tree)) if is_other else on_way
            token = self.random.randrange(self._vocab_size) if is_other else ids[0]
            if tree.child(parent, token) is None:
                tree.token_ids.append(token)
                tree.parents.append(parent)
            elif is_other:
                continue
            if not is_other:
                child, ids = tree.child(on_way, token), ids[1:]
                assert child is not None
                on_way = child
        return tree

    def is_promising(self, batch: Batch, slots: Sequence[int]) -> bool:
        return self.random.random() < 0.5


class AnyDrafts(Speculation):
    """Speculation that waits for tokens, or does not, and drafts as many as comes into its mind."""

    def __init__(self, drafter: ScriptedDrafter, num_slots: int) -> None:
        super().__init__(drafter, num_slots)
        self._scripted = drafter

    def wants_ids(self, batch: Batch) -> bool:
        return self._scripted.random.random() < 0.7

    def draft(
        self, batch: Batch, slots: Sequence[int], room: Sequence[int], num_tokens: int, reserve: Reserve
    ) -> list[Tree]:
        drafts = []
        for slot, count in zip(slots, room, strict=True):
            self._kinds[slot] = 0
            wanted = reserve(slot, self._scripted.random.randint(0, min(count, 9)))
            tree = self._scripted.draft_tree(batch, slot, wanted)
            drafts.append(self._fitting(batch, slot, tree))
        return drafts
