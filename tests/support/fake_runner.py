"""A model that needs no weights: the next id is a hash of all ids before it, which it reads back from paged pools.

A step really stores its ids by `slot_mapping` and finds what its queries see by `block_tables`, so any mistake in
blocks, positions, lengths or late ids is noticed: what each KV group has in sight must be what the sequence is.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from fake_drafts import AnyDrafts, ScriptedDrafter
from fake_mover import FakeMover
from numpy.typing import NDArray
from rules_by_hand import banned_behind, penalties_behind

from inferc.kv_groups import CacheGroup, EvictedCacheGroup
from inferc.runtime.engine.engine import Engine, ModelLimits
from inferc.runtime.scheduler.config import SchedulerConfig
from inferc.runtime.step.plan import F32, I32, Logprobs, StepPlan, StepResult, TokenLists
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.step.sequence import Sequence as Seq

VOCAB_SIZE = 50
MUCH = 5.0  # the loss of a logit at which a token is not chosen
FULL = CacheGroup(8)


def next_id(context: list[int], seed: int = 0, counter: int = 0, banned: frozenset[int] = frozenset()) -> int:
    token = zlib.crc32(np.array([*context, seed % 2**63, counter], np.int64).tobytes()) % VOCAB_SIZE
    while token in banned and len(banned) < VOCAB_SIZE:
        token = (token + 1) % VOCAB_SIZE
    return token


def avoided_behind(ids: list[int], params: SamplingParams) -> frozenset[int]:
    """Return the ids whose logits lose so much behind these that this model does not choose them."""
    return frozenset(token for token, loss in penalties_behind(ids, params).items() if loss >= MUCH)


def drawn_of(ids: list[int], position: int) -> int:
    """A number for the query at a position."""
    return zlib.crc32(np.array(ids[: position + 1], np.int64).tobytes())


def mass_of(drawn: int, block: int) -> int:
    """Return the attention that the query with this number gives a block."""
    return drawn * (block + 1) % 997


def is_counted(position: int, group: CacheGroup) -> bool:
    if not isinstance(group, EvictedCacheGroup):
        return False
    end = (position // group.stride + 1) * group.stride
    return bool(group.counted) and position >= end - group.counted and end >= group.first_choice - group.stride


def kept_blocks(ids: list[int], position: int, group: CacheGroup, size: int) -> list[int]:
    """Return the evictable blocks that the query at a position still sees in an evicted group, in token order."""
    if not isinstance(group, EvictedCacheGroup) or not group.first_key(position):
        return []
    if not group.counted:
        return list(range(group.sinks // size))
    kept_from: dict[int, list[int]] = {}
    kept: list[int] = []
    scores: dict[int, int] = {}
    begin = 0
    for choice in range(group.first_choice, position + 1, group.stride):
        scores = {block: score // 2 for block, score in scores.items()}
        for query in range(choice - 2 * group.stride, choice - group.stride):
            if query < 0 or not is_counted(query, group):
                continue
            before = kept_from.get(query // group.stride * group.stride, [])
            drawn = drawn_of(ids, query)
            for block in (*before, *range(group.first_key(query) // size, query // size + 1)):
                scores[block] = scores.get(block, 0) + mass_of(drawn, block)
        end = group.first_key(choice) // size
        best = sorted((*kept, *range(begin, end)), key=lambda block: (-scores.get(block, 0), -block))
        kept, begin = sorted(best[: group.sinks // size]), end
        kept_from[choice] = kept
    return kept


def seen_tokens(ids: list[int], position: int, group: CacheGroup, size: int) -> list[int]:
    """Return the tokens that the query at a position sees where a cache evicts, else all up to it."""
    if not isinstance(group, EvictedCacheGroup):
        return list(range(position + 1))
    kept = kept_blocks(ids, position, group, size)
    return [
        *[block * size + place for block in kept for place in range(size)],
        *range(group.first_key(position), position + 1),
    ]


def seen_of(ids: list[int], position: int, group: CacheGroup, size: int = 4) -> list[int]:
    """The ids of these."""
    return [ids[place] for place in seen_tokens(ids, position, group, size)]


def oracle(
    prompt: list[int],
    params: SamplingParams,
    eos: tuple[int, ...],
    max_total: int,
    seed: int | None = None,
    broken: list[int] | None = None,
    group: CacheGroup = FULL,
    size: int = 4,
) -> tuple[list[int], str]:
    """The output of one sequence run alone, and its finish reason.

    broken: the context without finite logits. group: of what it sees, if that is not all, in blocks of `size`.
    """
    ids = list(prompt)
    output: list[int] = []
    limit = max_total if params.max_tokens is None else min(max_total, len(prompt) + params.max_tokens)
    stops = frozenset((*(() if params.ignore_eos else eos), *params.stop_token_ids))
    while True:
        if ids == broken:
            return output, "error"
        sampled = (0, 0) if params.greedy else (params.seed if seed is None else seed, len(output))
        banned = frozenset(params.banned_token_ids) | (stops if len(output) < params.min_tokens else frozenset())
        banned |= banned_behind(ids, params) | avoided_behind(ids, params)
        output.append(next_id(seen_of(ids, len(ids) - 1, group, size), sampled[0] or 0, sampled[1], banned))
        ids.append(output[-1])
        if output[-1] in stops:
            return output, "stop"
        if len(ids) >= limit:
            return output, "length"


class FakeRunner:
    """Runs a step when it is waited for, that is as late as possible, with all checks a plan must pass."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        lower = config.num_offloaded or (0,) * len(config.num_blocks)
        self.pools: list[NDArray[np.int64]] = [
            np.full((count + below) * config.block_size, -1, np.int64)
            for count, below in zip(config.num_blocks, lower, strict=True)
        ]
        self.texts: dict[int, list[int]] = {}  # by slot: what its sequence is so far
        self.sequences: list[Any] = []  # the scheduler's, by slot: what begins in the cache must be its first tokens
        self.scored_text: list[int] = []  # the same of a text that is scored, which is no sequence
        self.last = np.full(config.max_num_seqs, -1, np.int64)
        self.penalised: dict[int, list[int]] = {}
        self.queue: deque[StepPlan] = deque()
        self.num_steps = 0
        self.num_copied = 0  # tokens whose K and V were copied
        self.num_loaded = 0  # blocks that were copied to the arena
        self.closed = False
        self.fail_at: int | None = None
        self.broken_prompt: list[int] | None = None  # whose logits are not finite

    def submit(self, plan: StepPlan) -> None:
        assert len(self.queue) <= 1, "more than one step in flight"
        self.queue.append(plan)

    def wait(self) -> StepResult:
        plan = self.queue.popleft()
        self.num_steps += 1
        if self.num_steps == self.fail_at:
            return StepResult(np.zeros(0, np.int32), error="the fake model broke")
        rows = self._run(plan)
        sample, ids, logprobs = plan.sample, list[int](), list[Logprobs | None]()
        banned, allowed = _lists(sample.banned, len(sample)), _lists(sample.allowed, len(sample))
        biases = _biases(sample.logit_bias, len(sample))
        inputs, last_counted = plan.token_ids[plan.logits_rows].tolist(), dict[int, int]()
        for i, (context, slot) in enumerate(zip(rows, sample.seq_slots.tolist(), strict=True)):
            # A row behind a drafted token counts if that token is what its parent chose.
            begins = not i or sample.seq_slots[i - 1] != slot
            parent = -1 if begins else i - 1 if plan.tree is None else int(plan.tree.parents[i])
            assert begins == (parent < 0) and parent < i and (begins or sample.seq_slots[parent] == slot)
            counts = begins or (
                last_counted[slot] == parent and ids[parent] == inputs[i] and rows[parent] != self.broken_prompt
            )
            if counts:
                last_counted[slot] = i
            seed, counter = (int(sample.seeds[i]), int(sample.counters[i])) if sample.temperature[i] else (0, 0)
            forbidden = frozenset(banned[i]) | {token for token, bias in biases[i] if bias <= -MUCH}
            if allowed[i]:
                forbidden |= frozenset(range(VOCAB_SIZE)) - frozenset(allowed[i])
            ids.append(next_id(context, seed, counter, forbidden))
            if counts:
                self.last[slot] = ids[-1]
            if slot in self.penalised and counts:
                assert self.penalised[slot] == context, "penalty counts are off"
                self.penalised[slot].append(ids[-1])
            count = int(sample.num_logprobs[i])
            likeliest = next_id(context)  # of the logits as they are, whatever is allowed
            top = tuple((token, -float(token)) for token in (likeliest, *range(VOCAB_SIZE)) if token != likeliest)
            top = ((likeliest, 0.0), *top)[:count]
            logprobs.append(Logprobs(ids[-1], -float(ids[-1]), 1, top) if count else None)
        for slot, i in last_counted.items() if plan.tree is not None else ():
            self.texts[slot] = list(rows[i])  # the next step goes on from the branch that was chosen
        failed = np.array([context == self.broken_prompt for context in rows], np.bool_)
        return StepResult(np.array(ids, np.int32), logprobs, failed if failed.any() else None)

    def reset_slot(self, slot: int, prompt_ids: I32 | None, output_ids: I32 | None = None) -> None:
        self.last[slot] = -1
        self.texts.pop(slot, None)
        self.penalised.pop(slot, None)
        if prompt_ids is not None:
            self.penalised[slot] = [*prompt_ids.tolist(), *([] if output_ids is None else output_ids.tolist())]

    def score(self, plan: StepPlan, target_ids: I32) -> tuple[F32, I32]:
        assert not self.queue, "a step is in flight"
        argmax = [next_id(context) for context in self._run(plan)]
        return -target_ids.astype(np.float32), np.array(argmax, np.int32)

    def close(self) -> None:
        self.closed = True

    def _run(self, plan: StepPlan) -> list[list[int]]:
        """Store the step's ids; the context of each logits row."""
        size, config = self.config.block_size, self.config
        starts = plan.query_start_loc.tolist()
        assert plan.num_tokens <= config.max_num_batched_tokens and 0 < plan.num_seqs
        num_own = plan.num_seqs - plan.num_branches
        assert 0 < num_own <= config.max_num_seqs
        assert starts[0] == 0 and starts[-1] == plan.num_tokens and len(starts) == plan.num_seqs + 1
        assert len(set(plan.seq_slots[:num_own].tolist())) == num_own
        assert (
            plan.token_ids.dtype
            == plan.query_start_loc.dtype
            == plan.seq_lens.dtype
            == plan.logits_rows.dtype
            == np.int32
        )
        assert plan.positions.dtype == plan.slot_mapping[0].dtype == np.int64
        assert plan.seq_slots.dtype == plan.block_tables[0].dtype == np.int32
        ids = plan.token_ids.astype(np.int64)
        ids[plan.pending_rows] = self.last[plan.pending_slots]
        assert ((ids >= 0) & (ids < VOCAB_SIZE)).all(), "a late id that was never sampled"
        contexts: dict[int, list[int]] = {}
        for pool, loads, count in zip(self.pools, plan.loads, config.num_blocks, strict=False):
            of_blocks = pool.reshape(-1, size)
            assert not len(loads.source) or loads.source.min() >= count > loads.target.max() > 0
            of_blocks[loads.target] = of_blocks[loads.source]
            self.num_loaded += len(loads.source)
        if not config.offload_in_place:
            for table, count in zip(plan.block_tables, config.num_blocks, strict=True):
                assert table.max() < count, "a step reads below the arena"
        for pool, copies in zip(self.pools, plan.copies, strict=False):
            for source, target in zip(copies.source.tolist(), copies.target.tolist(), strict=True):
                pool[target] = pool[source]
            self.num_copied += len(copies.source)
        for mapping, count in zip(plan.slot_mapping, config.num_blocks, strict=True):
            assert len(set(mapping.tolist())) == plan.num_tokens and mapping.min() >= size, (
                "slots clash, or block 0 is used"
            )
            assert mapping.max() < count * size, "a step writes below the arena"
        for pool, mapping in zip(self.pools, plan.slot_mapping, strict=True):
            pool[mapping] = ids  # of all sequences, before any is read, as a layer of a model does
        self._echo(plan)
        for b in range(plan.num_seqs):
            first, end, length = starts[b], starts[b + 1], int(plan.seq_lens[b])
            start = int(plan.positions[first])
            evicted = next((group for group in config.groups if isinstance(group, EvictedCacheGroup)), None) or FULL
            sinks = evicted.sinks if isinstance(evicted, EvictedCacheGroup) else 0
            forgotten = max(0, evicted.first_key(start) - sinks)
            length += forgotten
            assert plan.positions[first:end].tolist() == list(range(start, length))
            assert evicted.first_key(start) == evicted.first_key(length - 1), "queries of a step see different keys"
            assert end > first and length <= config.max_model_len
            slot = int(plan.seq_slots[b])
            if slot not in self.texts:
                assert config.prefix_cache or not start
                seq = self.sequences[slot]
                self.texts[slot] = (self.scored_text if seq is None else seq.token_ids)[:start] if start else []
            text = self.texts[slot] if b < num_own else self._text_of_branch(plan, b)
            assert len(text) >= start, "tokens before these were never computed"
            text[start:] = ids[first:end].tolist()
            for group, pool, mapping, table in zip(
                config.groups, self.pools, plan.slot_mapping, plan.block_tables, strict=True
            ):
                seen = group.first_key(start)
                where = np.arange(seen, length)
                column = np.where(where < sinks, where, where - forgotten) // size
                forgets = isinstance(group, EvictedCacheGroup)
                if forgets:
                    where = np.array([*seen_tokens(text, start, group, size), *range(start + 1, length)])
                    column = np.arange(len(where)) // size
                out_of_sight = np.delete(table[b], column)
                is_branch = b >= num_own  # its sequence's own query may still see what its queries do not
                assert forgets or is_branch or not out_of_sight[: seen // size].any(), "not given back"
                slots = table[b, column].astype(np.int64) * size + where % size
                assert (slots[first - end :] == mapping[first:end]).all()
                there = [text[place] for place in where.tolist()]
                assert slots.min() >= size and pool[slots].tolist() == there, f"{group}: another's K and V"
            for row in range(first, end):
                contexts[row] = seen_of(text, int(plan.positions[row]), evicted, size)
            self._count(plan, b, text, evicted)
        assert len(plan.sample) == len(plan.logits_rows)
        return [contexts[row] for row in plan.logits_rows.tolist()]

    def _echo(self, plan: StepPlan) -> None:
        """Copy what each layer of a model copies once it has written its K and V."""
        for pool, echo, mapping in zip(
            self.pools, () if plan.tree is None else plan.tree.echoes, plan.slot_mapping, strict=False
        ):
            written = {*mapping.tolist(), *echo.target.tolist()}
            assert len(written) == len(mapping) + len(echo.target), "two tokens are written to a slot"
            assert not set(echo.source.tolist()) & set(echo.target.tolist()), "an echo of an echo"
            pool[echo.target] = pool[echo.source]

    def _text_of_branch(self, plan: StepPlan, b: int) -> list[int]:
        """Return the tokens of a branch to its end."""
        rows = plan.logits_rows.tolist()
        of_slot = np.flatnonzero(plan.sample.seq_slots == plan.seq_slots[b])
        first, last = int(of_slot[0]), rows.index(int(plan.query_start_loc[b + 1]) - 1)
        known = int(plan.positions[rows[first]]) + 1
        way = plan.drafts_of(first, len(of_slot))[last - first]
        return [*self.texts[int(plan.seq_slots[b])][:known], *way]

    def _count(self, plan: StepPlan, b: int, text: list[int], group: CacheGroup) -> None:
        """Add what the counted queries of one sequence give; exactly those that must be are counted."""
        first, end = plan.query_start_loc[b : b + 2].tolist()
        positions = plan.positions[first:end].tolist()
        wanted = [first + i for i, position in enumerate(positions) if is_counted(position, group)]
        begin = end if plan.scored is None else int(plan.scored.first_rows[b])
        assert wanted == list(range(begin, end)), "others are counted"
        for row in wanted:
            position, size = int(plan.positions[row]), self.config.block_size
            blocks = [
                *kept_blocks(text, position, group, size),
                *range(group.first_key(position) // size, position // size + 1),
            ]
            for masses in plan.scored.scores if plan.scored is not None else ():
                for column, block in enumerate(blocks):
                    if masses is not None:
                        masses[b, column] += mass_of(drawn_of(text, position), block)


def go_on(seq: Seq, known: list[int], count: int) -> list[int]:
    """Return the next tokens of a sequence, as `oracle` has them."""
    ids = list(known)
    for _ in range(count):
        num_output = len(ids) - seq.prompt_len
        sampled = (0, 0) if seq.params.greedy else (seq.seed, num_output)
        early = seq.stop_ids if num_output < seq.params.min_tokens else frozenset()
        banned = frozenset(seq.params.banned_token_ids) | early
        banned |= banned_behind(ids, seq.params) | avoided_behind(ids, seq.params)
        ids.append(next_id(ids, *sampled, banned))
    return ids[len(known) :]


def _lists(lists: object, count: int) -> list[list[int]]:
    starts, ids = lists.starts.tolist(), lists.token_ids.tolist()  # type: ignore[attr-defined]
    if not starts:
        return [[] for _ in range(count)]
    assert len(starts) == count + 1
    return [ids[starts[i] : starts[i + 1]] for i in range(count)]


def _biases(lists: TokenLists, count: int) -> list[list[tuple[int, float]]]:
    values = iter(lists.values.tolist())
    found = [[(token, next(values)) for token in row] for row in _lists(lists, count)]
    assert all(len(dict(row)) == len(row) for row in found), "a token has two biases"
    return found


def make_engine(
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    max_model_len: int = 64,
    num_blocks: int | Sequence[int] = 40,
    block_size: int = 4,
    groups: Sequence[CacheGroup] = (FULL,),
    chunked_prefill: bool = True,
    eos: tuple[int, ...] = (),
    pipeline: bool = True,
    prefix_cache: bool = False,
    policy: str = "fcfs",
    tbt_ms: float | None = None,
    overcommit: bool = False,
    kv_events: bool = False,
    partial_blocks: bool = False,
    clock: Callable[[], float] = time.monotonic,
    num_offloaded: int = 0,
    mover: FakeMover | None = None,
    offload_in_place: bool = True,
    idle_work: Callable[[], bool] | None = None,
    drafts: int | None = None,
    branching: float = 0.0,
) -> Engine:
    """Make an engine of the fake model.

    drafts: the seed of tokens that are drafted, if any are. branching: the share of these that are in other branches.
    """
    counts = (num_blocks,) * len(groups) if isinstance(num_blocks, int) else tuple(num_blocks)
    config = SchedulerConfig(
        max_num_seqs,
        max_num_batched_tokens,
        max_model_len,
        counts,
        block_size,
        tuple(groups),
        chunked_prefill,
        prefix_cache,
        policy,
        tbt_ms,
        overcommit,
        kv_events,
        (num_offloaded,) * len(groups) if num_offloaded else (),
        offload_in_place,
        partial_blocks,
    )
    runner = FakeRunner(config)
    if num_offloaded:
        mover = mover or FakeMover()
        mover.attach(runner.pools, config)
    limits = ModelLimits(VOCAB_SIZE, max_model_len, eos)
    speculation = None
    if drafts is not None:
        drafter = ScriptedDrafter(go_on, VOCAB_SIZE, seed=drafts)
        drafter.branching = branching
        speculation = AnyDrafts(drafter, max_num_seqs)
    engine = Engine(
        runner, limits, config, pipeline, clock=clock, mover=mover, idle_work=idle_work, speculation=speculation
    )
    runner.sequences = engine.scheduler.batch.seqs
    return engine


def make_for_ever(begun: str) -> Engine:
    """Load without an end; begun: a FIFO that is opened, and closed again, when the loading has begun."""
    with open(begun, "wb"):
        pass
    wait_for_ever()
    return make_engine()


def make_breaking(ends: bool = True) -> Engine:
    """Make an engine that breaks in its third step, and whose process then ends or does not."""
    engine = make_engine()
    engine.runner.fail_at = 3  # type: ignore[attr-defined]
    if not ends:
        engine.runner.close = wait_for_ever  # type: ignore[method-assign]
    return engine


def wait_for_ever() -> None:
    threading.Event().wait()
