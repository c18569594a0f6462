"""The drafter that is a model: a smaller one of the same vocabulary guesses the next tokens, one step after the other.

What the prefix cache finds for the large model is found for the draft model, if it computed it. What it computed that
was not chosen is written over. Source: Leviathan et al. 2023, arXiv:2211.17192.

It draws with the temperature, the seed and the random numbers of the large model. Where both models think alike they
then choose alike, also in sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inferc.errors import InfercError
from inferc.runtime.grammar.masks import Constraint, FixedMasks
from inferc.runtime.runners.api import Runner
from inferc.runtime.scheduler.batch import Batch
from inferc.runtime.speculation.drafter import NOTHING, Guesses, Offer
from inferc.runtime.speculation.stepping import EXPECTED, DraftSizes, SteppingDrafter
from inferc.runtime.step.plan import I32, SampleRows
from inferc.runtime.step.sequence import Sequence as Seq

KIND = 9


@dataclass
class _Slot:
    """A sequence's place in the draft model.

    num_preemptions: how often the sequence had been preempted when it came.
    num_computed: the first tokens whose K and V are there. num_named: its first blocks whose content is noted.
    drafted: what was drafted behind `num_known` tokens.
    """

    seq: Seq | None = None
    num_preemptions: int = 0
    num_computed: int = 0
    num_named: int = 0
    num_known: int = 0
    drafted: tuple[int, ...] = ()


class ModelDrafter(SteppingDrafter):
    """The drafter of a smaller model, whose runner has as many blocks as the large model's full KV group.

    most: the most tokens that are drafted at once.
    """

    def __init__(self, runner: Runner, sizes: DraftSizes, num_slots: int, most: int) -> None:
        super().__init__(sizes, most)
        self._runner = runner
        self._slots = [_Slot() for _ in range(num_slots)]
        self._content: dict[int, bytes] = {}  # by block, the hash of the tokens whose K and V it has

    def offers(self, batch: Batch, slots: Sequence[int]) -> list[Offer]:
        """Return what can be drafted for sequences whose tokens the draft model has computed.

        For the others it computes as many as a step takes.
        """
        offers, left = [], self._sizes.max_num_batched_tokens
        behind: list[tuple[int, int]] = []
        for slot in slots:
            state = self._settle(batch, slot)
            known = int(batch.num_known[slot])
            room = min(self._sizes.max_model_len, len(batch.tokens[slot])) - known
            missing = known - state.num_computed
            if room <= 0 or missing > self._per_sequence(len(slots)):
                offers.append(NOTHING)
                count = min(missing - 1, left) if room > 0 else 0
                if count > 0:
                    behind.append((slot, count))
                    left -= count
            else:
                offers.append(Offer(min(self._most, room), KIND, EXPECTED, self._sizes.num_others))
        if behind:
            self._compute(batch, behind)
        return offers

    def _per_sequence(self, num_seqs: int) -> int:
        """Return how many tokens each sequence may have in one step."""
        return max(2, self._sizes.max_num_batched_tokens // max(1, num_seqs))

    def guess(self, batch: Batch, slots: Sequence[int], counts: Sequence[int]) -> list[Guesses]:
        """Draft tokens, and note how far the K and V of each sequence go then."""
        for slot in slots:
            state = self._slots[slot]
            state.num_known, state.drafted = int(batch.num_known[slot]), ()
        drafts = super().guess(batch, slots, counts)
        for slot, each in zip(slots, drafts, strict=True):
            ids = each.token_ids
            self._slots[slot].drafted = tuple(ids)
            if ids:
                self._slots[slot].num_computed = int(batch.num_known[slot]) + len(ids) - 1
        return drafts

    def close(self) -> None:
        """Close the draft model's runner."""
        self._runner.close()

    def _settle(self, batch: Batch, slot: int) -> _Slot:
        """Return a slot's place, after what became of its last drafts, or of a sequence that is new there."""
        state, seq = self._slots[slot], batch.seqs[slot]
        assert seq is not None and self._table is not None
        if state.seq is not seq or state.num_preemptions != seq.num_preemptions:
            state = self._slots[slot] = _Slot(seq, seq.num_preemptions)
            limit = (int(batch.num_known[slot]) - 1) // self._sizes.block_size
            for block, name in zip(self._table[slot].tolist(), seq.hashes[:limit], strict=False):
                if not block or self._content.get(block) != name:
                    break
                state.num_named += 1
            state.num_computed = state.num_named * self._sizes.block_size
        elif state.drafted:
            chosen = batch.tokens[slot, state.num_known : state.num_known + len(state.drafted)].tolist()
            right = next((at for at, token in enumerate(state.drafted) if chosen[at] != token), len(state.drafted))
            known = int(batch.num_known[slot])
            state.num_computed = min(state.num_known + min(right, len(state.drafted) - 1), known - 1)
            state.drafted = ()
        self._name_blocks(state, slot)
        return state

    def _name_blocks(self, state: _Slot, slot: int) -> None:
        """Note what the blocks have that were computed to their end."""
        assert state.seq is not None and self._table is not None
        end = min(state.num_computed // self._sizes.block_size, len(state.seq.hashes))
        for index in range(state.num_named, end):
            self._content[int(self._table[slot, index])] = state.seq.hashes[index]
        state.num_named = max(state.num_named, end)

    def _compute(self, batch: Batch, behind: Sequence[tuple[int, int]]) -> None:
        """Compute the next tokens of some sequences, without sampling."""
        slots = [slot for slot, _ in behind]
        texts = []
        for slot, count in behind:
            start = self._slots[slot].num_computed
            texts.append((start, batch.tokens[slot, start : start + count]))
            self._forget(slot, start, start + count)
        self._run(slots, texts, None)
        for slot, count in behind:
            self._slots[slot].num_computed += count
            self._name_blocks(self._slots[slot], slot)

    def _next(
        self,
        batch: Batch,
        slots: list[int],
        last: list[list[int]],
        depth: int,
        places: Sequence[Constraint | None],
    ) -> list[int]:
        """Run one step for each slot over the token that was drafted last, or over all that it lacks; sample one."""
        texts: list[tuple[int, I32]] = []
        for slot, ids in zip(slots, last, strict=True):
            known = int(batch.num_known[slot])
            if depth:
                texts.append((known + depth - 1, np.array(ids, np.int32)))
            else:
                start = self._slots[slot].num_computed
                texts.append((start, batch.tokens[slot, start:known]))
            self._forget(slot, texts[-1][0], known + depth)
        counters = batch.num_known[slots] - batch.prompt_len[slots] + depth
        rows = batch.draft_rows(np.array(slots, np.int64), counters.astype(np.uint64), self._sizes.vocab_size)
        rows = self._asking(rows)
        masks = FixedMasks(places, self._sizes.vocab_size) if any(places) else None
        return self._run(slots, texts, rows, masks).tolist()  # type: ignore[no-any-return]

    def _forget(self, slot: int, start: int, end: int) -> None:
        """Forget the content of the blocks that are written to."""
        assert self._table is not None
        size = self._sizes.block_size
        for index in range(start // size, (end - 1) // size + 1):
            self._content.pop(int(self._table[slot, index]), None)

    def _run(
        self,
        slots: list[int],
        texts: list[tuple[int, I32]],
        rows: SampleRows | None,
        masks: FixedMasks | None = None,
    ) -> I32:
        """Run a step over some tokens of each slot, from a position on; return the ids sampled behind them, if any."""
        assert self._table is not None
        most = max(start + len(ids) for start, ids in texts)
        table = self._table[slots, : -(-most // self._sizes.block_size)]
        starts, ids = [start for start, _ in texts], [ids for _, ids in texts]
        self._runner.submit(self._plan(slots, table, starts, ids, rows, masks))
        result = self._runner.wait()
        if result.error is not None:
            raise InfercError(f"the step of the draft model failed: {result.error}")
        self._show(result)
        return result.token_ids
