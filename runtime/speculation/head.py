"""The drafter that is a head: one layer that goes on from the hidden rows of the large model itself.

A row of the head is for a position p: the token at p + 1, beside what the large model made of the tokens up to p. So
every step of the large model is watched, and the rows that it computed are kept until the head has read them: at the
latest when the tokens of a block of the KV cache are complete. The head drafts behind the last known token, and goes on
with the rows of its own. Source: Li et al. 2025, arXiv:2503.01840.

K and V of the head are in blocks with the numbers of the large model's. Of each full block the last row is kept, too:
the next sequence that finds the block in the prefix cache may have another token behind it, and the large model
computes no row again that was found. (Of sequences that run at the same time, and differ from there on, the last one's
token counts.) What the head cannot know makes a sequence one without drafts: the rows of a text that was scored were
not watched, and its blocks are in the prefix cache.

It draws with the temperature, the seed and the random numbers of the large model, over the tokens that it can draft.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferc.arena import mask_words
from inferc.errors import InfercError
from inferc.runtime.grammar.grammars import Grammars
from inferc.runtime.grammar.masks import Constraint, FixedMasks
from inferc.runtime.runners.api import HeadRunner
from inferc.runtime.scheduler.batch import Batch
from inferc.runtime.speculation.drafter import NOTHING, Guesses, Offer
from inferc.runtime.speculation.head_rows import RowSource
from inferc.runtime.speculation.stepping import EXPECTED, DraftSizes, SteppingDrafter
from inferc.runtime.step.plan import I32, U32, HiddenRows, SampleRows, StepPlan, StepResult
from inferc.runtime.step.sequence import Sequence as Seq

KIND = 10


@dataclass
class _Slot:
    """A sequence's place in the head.

    num_preemptions: how often the sequence had been preempted when it came. rows: what the large model computed, from
    position `first` on. num_computed: the positions whose K and V are there, all of them by the large model's rows.
    num_named: the first blocks whose content is noted. is_lost: rows are missing, so that nothing can be drafted.
    num_found: its first tokens that were in the prefix cache, until it is looked up what the head has of them.
    """

    seq: Seq | None = None
    num_preemptions: int = 0
    rows: HiddenRows | None = None
    first: int = 0
    num_computed: int = 0
    num_named: int = 0
    is_lost: bool = False
    num_found: int = 0

    @property
    def end(self) -> int:
        """The number of positions whose rows were computed."""
        return self.first + (0 if self.rows is None else len(self.rows))

    def is_of(self, seq: Seq | None) -> bool:
        return seq is not None and self.seq is seq and self.num_preemptions == seq.num_preemptions


@dataclass(frozen=True, eq=False)
class _Part:
    """The rows [start, end) of a step, which are those of one sequence from a position on; `blocks`: its blocks."""

    state: _Slot
    slot: int
    position: int
    start: int
    end: int
    blocks: I32

    def rows(self, taken: list[int] | None) -> Sequence[int]:
        """Return the rows of the sequence's tokens, of which the first ones count.

        taken: the rows that gave it its tokens, if trees were drafted; all but the first are of drafted tokens.
        """
        if not taken:
            return range(self.start, self.end)
        return [*range(self.start, taken[0]), *taken]  # a prompt has others before the first


@dataclass(frozen=True)
class _Text:
    """Some positions of a slot that the head computes, and what it reads of each: a token, and a row of its input."""

    slot: int
    start: int
    token_ids: I32
    hidden: HiddenRows
    blocks: I32

    def cut(self, count: int) -> tuple[_Text, _Text]:
        """Return the first positions, and the others."""
        ids, hidden = self.token_ids, self.hidden
        return (
            _Text(self.slot, self.start, ids[:count], hidden[:count], self.blocks),
            _Text(self.slot, self.start + count, ids[count:], hidden[count:], self.blocks),
        )


class HeadDrafter(SteppingDrafter):
    """The drafter of a head, whose runner has as many blocks as the large model's full KV group.

    most: the most tokens that are drafted at once. rows: those that the head reads. token_ids: the large model's id of
    each token that the head can draft; None: it can draft all.
    """

    reads_steps = True

    def __init__(
        self,
        runner: HeadRunner,
        sizes: DraftSizes,
        num_slots: int,
        most: int,
        rows: RowSource,
        token_ids: I32 | None = None,
    ) -> None:
        super().__init__(sizes, most)
        self._runner, self._rows, self._token_ids = runner, rows, token_ids
        self._slots = [_Slot() for _ in range(num_slots)]
        self._content: dict[int, bytes] = {}  # by block, the hash of the tokens whose K and V it has
        self._tails: dict[int, HiddenRows] = {}  # by such a block, the large model's row of its last position
        self._parts: deque[list[_Part]] = deque()  # of the steps in flight
        self._landed: tuple[list[_Part], HiddenRows, dict[int, list[int]]] | None = None  # and `StepTree.taken`
        self._own: dict[int, HiddenRows] = {}  # by slot, the row of the head behind what was drafted last
        self._batch: Batch | None = None

    def hold_to(self, grammars: Grammars, batch: Batch) -> None:
        """Hold drafts to the grammars of their sequences."""
        super().hold_to(grammars, batch)
        self._batch = batch

    def close(self) -> None:
        """Close the head's runner."""
        self._runner.close()

    # ------------------------------------------------------------------------------------- the large model's steps

    def submitted(self, plan: StepPlan, seqs: Sequence[Seq | None]) -> None:
        """Ask for the rows of a step, and note whose they are."""
        assert self._table is not None
        plan.tapped_rows = np.arange(plan.num_tokens, dtype=np.int64)
        bounds, parts = plan.query_start_loc.tolist(), []
        for at, slot in enumerate(plan.seq_slots[: plan.num_seqs - plan.num_branches].tolist()):
            seq, position = seqs[slot], int(plan.positions[bounds[at]])
            assert seq is not None, "it is in the step"
            blocks = self._table[slot, : -(-int(plan.seq_lens[at]) // self._sizes.block_size)].copy()
            if not self._slots[slot].is_of(seq):
                self._slots[slot] = _Slot(seq, seq.num_preemptions, num_found=position)
            parts.append(_Part(self._slots[slot], slot, position, bounds[at], bounds[at + 1], blocks))
        self._parts.append(parts)

    def _knows(self, part: _Part) -> bool:
        """Return whether the head has what a sequence found in the prefix cache, which is nothing once it was taken."""
        count, within = divmod(part.state.num_found, self._sizes.block_size)
        assert part.state.seq is not None, "it has a slot"
        return (
            not within
            and [self._content.get(block) for block in part.blocks[:count].tolist()] == (part.state.seq.hashes[:count])
        )

    def _take_found(self, part: _Part) -> None:
        """Go on behind what a sequence found in the prefix cache."""
        state, position = part.state, part.state.num_found
        if not position:
            return
        state.num_found, state.is_lost = 0, not self._knows(part)
        if not state.is_lost:
            # The last position is computed again, with the token that this sequence has behind it.
            count = position // self._sizes.block_size
            state.rows, state.first = self._tails[int(part.blocks[count - 1])], position - 1
            state.num_computed, state.num_named = position - 1, count - 1

    def landed(self, plan: StepPlan, result: StepResult) -> None:
        """Keep the rows of a step, until it is known which of its tokens count."""
        taken = {} if plan.tree is None else plan.tree.taken
        self._landed = self._parts.popleft(), self._rows.given(result), taken

    def updated(self) -> None:
        """Give the rows of the landed step to their sequences, and compute the blocks that are complete."""
        assert self._landed is not None and self._batch is not None, "a step landed"
        (left, rows, taken), self._landed = self._landed, None
        while left:  # what one sequence found in the prefix cache may be what another computed in this step
            parts = [part for part in left if self._knows(part)] or left
            left = [part for part in left if part not in parts]
            self._take_rows(parts, rows, taken)

    def _take_rows(self, parts: Sequence[_Part], rows: HiddenRows, taken: dict[int, list[int]]) -> None:
        """Give the rows of a step to some of its sequences. taken: as in `StepTree`."""
        assert self._batch is not None
        texts: list[_Text] = []
        size = self._sizes.block_size
        for part in parts:
            self._take_found(part)
            state, known = part.state, int(self._batch.num_known[part.slot])
            own = part.rows(taken.get(part.slot))
            count = min(len(own), known - 1 - part.position)
            if state.is_lost or count <= 0 or self._slots[part.slot] is not state or not state.is_of(state.seq):
                continue
            if part.position != state.end or part.position >= self._sizes.max_model_len:
                state.is_lost, state.rows = True, None
                continue
            new = rows[list(own[:count])]
            state.rows = new if state.rows is None else self._rows.join((state.rows, new))
            complete = min(state.end, self._sizes.max_model_len) // size * size
            if complete > state.num_computed:
                texts.append(self._text(part.slot, state, state.num_computed, complete, part.blocks))
        if texts:
            self._compute(texts)
        for part in parts:
            state = part.state
            if not state.is_lost and state.rows is not None and self._slots[part.slot] is state:
                self._settle(state, part.blocks)
                if state.end > self._sizes.max_model_len:  # nothing more is drafted, and no block is left to compute
                    state.is_lost, state.rows = True, None

    def _text(self, slot: int, state: _Slot, start: int, end: int, blocks: I32) -> _Text:
        """Return the positions [start, end) of a slot, whose rows are the large model's."""
        assert self._batch is not None and state.rows is not None
        hidden = self._rows.as_input(state.rows[start - state.first : end - state.first], is_own=False)
        return _Text(slot, start, self._batch.tokens[slot, start + 1 : end + 1].copy(), hidden, blocks)

    def _compute(self, texts: Sequence[_Text]) -> None:
        """Compute K and V of some positions, in as many steps as they take; note how far each sequence is."""
        left = list(texts)
        while left:
            now: list[_Text] = []
            room = self._sizes.max_num_batched_tokens
            while left and room:
                text, rest = left.pop(0).cut(room)
                now.append(text)
                room -= len(text.token_ids)
                if len(rest.token_ids):
                    left.insert(0, rest)
            self._run(now, None)
        for text in texts:
            state = self._slots[text.slot]
            state.num_computed = max(state.num_computed, text.start + len(text.token_ids))

    def _settle(self, state: _Slot, blocks: I32) -> None:
        """Note what the computed blocks have, and forget the rows that are read."""
        assert state.seq is not None and state.rows is not None
        size = self._sizes.block_size
        for index in range(state.num_named, state.num_computed // size):
            last = (index + 1) * size - 1
            if last >= state.first:
                self._tails[int(blocks[index])] = state.rows[last - state.first : last - state.first + 1].copy()
        for index in range(state.num_named, min(state.num_computed // size, len(state.seq.hashes))):
            self._content[int(blocks[index])] = state.seq.hashes[index]
            state.num_named = index + 1
        keep = min(state.num_computed, state.end - 1)
        if keep > state.first:
            state.rows, state.first = state.rows[keep - state.first :].copy(), keep

    # ------------------------------------------------------------------------------------------------- drafts

    def offers(self, batch: Batch, slots: Sequence[int]) -> list[Offer]:
        """Return what can be drafted for sequences all of whose rows are there."""
        offers = []
        for slot in slots:
            state, known = self._slots[slot], int(batch.num_known[slot])
            room = min(self._sizes.max_model_len, len(batch.tokens[slot])) - known
            can = state.is_of(batch.seqs[slot]) and not state.is_lost and state.end == known - 1 > 0 < room
            offers.append(Offer(min(self._most, room), KIND, EXPECTED, self._sizes.num_others) if can else NOTHING)
        return offers

    def guess(self, batch: Batch, slots: Sequence[int], counts: Sequence[int]) -> list[Guesses]:
        """Draft tokens, after the head has computed what the large model's last step gave it."""
        assert self._table is not None
        missing = [self._slots[slot].end - 1 - self._slots[slot].num_computed for slot in slots]
        if sum(missing) + len(slots) > self._sizes.max_num_batched_tokens:
            texts = []
            for slot, count in zip(slots, missing, strict=True):
                if count > 0:
                    state = self._slots[slot]
                    texts.append(self._text(slot, state, state.num_computed, state.end - 1, self._table[slot]))
            self._compute(texts)
        return super().guess(batch, slots, counts)

    def _next(
        self,
        batch: Batch,
        slots: list[int],
        last: list[list[int]],
        depth: int,
        places: Sequence[Constraint | None],
    ) -> list[int]:
        assert self._table is not None
        texts = []
        for slot, ids in zip(slots, last, strict=True):
            state, blocks = self._slots[slot], self._table[slot]
            if depth:
                hidden = self._rows.as_input(self._own[slot], is_own=True)
                texts.append(_Text(slot, state.end + depth - 1, np.array(ids, np.int32), hidden, blocks))
            else:
                start = min(state.num_computed, state.end - 1)
                texts.append(self._text(slot, state, start, state.end, blocks))
        counters = batch.num_known[slots] - batch.prompt_len[slots] + depth
        of_head = self._token_ids
        # Lists of tokens name the large model's ids.
        vocab_size = self._sizes.vocab_size if of_head is None else 0
        rows = self._asking(batch.draft_rows(np.array(slots, np.int64), counters.astype(np.uint64), vocab_size))
        masks = FixedMasks(places, self._sizes.vocab_size) if any(places) else None
        if masks is not None and of_head is not None:
            masks.bits = chosen_bits(masks.bits, of_head)
        result = self._run(texts, rows, masks)
        own = self._rows.own(result)
        self._own = {slot: own[row : row + 1] for row, slot in enumerate(slots)}
        if not depth:
            for slot in slots:
                self._slots[slot].num_computed = self._slots[slot].end
        self._show(result, of_head)
        chosen = result.token_ids if of_head is None else of_head[result.token_ids]
        return [int(token) for token in chosen]

    def _run(self, texts: Sequence[_Text], rows: SampleRows | None, masks: FixedMasks | None = None) -> StepResult:
        """Run a step of the head over some positions of some slots, and sample behind the last of each if asked for."""
        size = self._sizes.block_size
        most = max(-(-(text.start + len(text.token_ids)) // size) for text in texts)
        table = np.zeros((len(texts), most), np.int32)
        for row, text in enumerate(texts):
            blocks = text.blocks[:most]
            table[row, : len(blocks)] = blocks
            end = text.start + len(text.token_ids)
            for index in range(text.start // size, (end - 1) // size + 1):
                self._content.pop(int(blocks[index]), None)
        slots, starts = [text.slot for text in texts], [text.start for text in texts]
        plan = self._plan(slots, table, starts, [text.token_ids for text in texts], rows, masks)
        plan.tapped_rows = plan.logits_rows.astype(np.int64)
        self._runner.submit(plan, self._rows.join([text.hidden for text in texts]))
        result = self._runner.wait()
        if result.error is not None:
            raise InfercError(f"the step of the head failed: {result.error}")
        return result


def chosen_bits(bits: U32, ids: I32) -> U32:
    """Return masks [rows, words] over the tokens `ids` alone, of masks over a whole vocabulary."""
    of_tokens: NDArray[Any] = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, ids]
    packed = np.zeros((len(bits), 4 * mask_words(len(ids))), np.uint8)
    own = np.packbits(of_tokens, axis=1, bitorder="little")
    packed[:, : own.shape[1]] = own
    return packed.view(np.uint32)
