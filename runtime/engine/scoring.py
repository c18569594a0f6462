"""The scoring of given texts: log probabilities of their tokens, or an embedding, in chunks between the engine's steps.

A step holds as many texts of one kind as it and the cache have room for. The rows of the scored tokens are computed,
whatever the prefix cache has of them, because their logits are the result; what is cached of the tokens before them is
not computed again. Other sequences can find the blocks of a scored text.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from inferc.errors import InfercError, UnsupportedError
from inferc.runtime.runners.api import EmbeddingRunner
from inferc.runtime.scheduler.scheduler import Scheduler
from inferc.runtime.step.plan import F32, I32, Logprobs, SampleRows, StepPlan, StepResult, TokenLists

Pooled: TypeAlias = Literal["last", "mean", "first"]


@dataclass(frozen=True)
class Pooling:
    """The way a text's vector is made of its tokens' hidden rows: the last one, their mean, or the first one."""

    kind: Pooled
    normalize: bool  # whether the vector is scaled to length 1


@dataclass(frozen=True)
class Score:
    """The log probability of each scored token, given those before it, and the most likely token there.

    They are all tokens of a text but the first, unless only the last ones were asked for.
    rows: the log probabilities with ranks and the most likely tokens, if `num_top` asked for some.
    """

    logprobs: list[float]
    argmax: list[int]
    rows: list[Logprobs] = field(default_factory=list)

    @staticmethod
    def of_rows(rows: list[Logprobs]) -> Score:
        """Return the Score of a text from the log probabilities of its scored tokens."""
        return Score([row.logprob for row in rows], [row.top[0][0] for row in rows], rows)


@dataclass
class _Job:
    """A text whose tokens [done, end) are still to be computed; the last token of a scored text needs no step."""

    request_id: str
    token_ids: list[int]
    num_top: int = 0
    first: int = 1  # the first token that is scored
    embeds: bool = False
    root: bytes = b""
    salt: str = ""
    adapter: int = 0  # the number of its LoRA adapter
    adapter_name: str = ""
    hashes: list[bytes] = field(default_factory=list)
    slot: int | None = None  # has blocks for all tokens in the KV groups that keep them
    done: int = 0
    logprobs: list[float] = field(default_factory=list)
    argmax: list[int] = field(default_factory=list)
    rows: list[Logprobs] = field(default_factory=list)
    vector: NDArray[np.float64] | None = None

    @property
    def kind(self) -> tuple[bool, int]:
        """The kind of the job; only jobs of one kind share a step."""
        return self.embeds, self.num_top

    @property
    def end(self) -> int:
        return len(self.token_ids) if self.embeds else len(self.token_ids) - 1


@dataclass(frozen=True)
class _Chunk:
    """The tokens [job.done, job.done + count) of a text, which are in this step."""

    job: _Job
    count: int

    @property
    def is_last(self) -> bool:
        return self.job.done + self.count == self.job.end

    @property
    def num_unscored(self) -> int:
        """The number of the chunk's first tokens whose next token is not scored."""
        return min(self.count, max(0, self.job.first - 1 - self.job.done))


class ScoreRunner(Protocol):
    """The part of a runner that scores; one that embeds has `embed(plan) -> [S, hidden_size]` as well."""

    def score(self, plan: StepPlan, target_ids: I32) -> tuple[F32, I32]: ...

    def submit(self, plan: StepPlan) -> None: ...

    def wait(self) -> StepResult: ...

    def reset_slot(self, slot: int, prompt_ids: I32 | None, output_ids: I32 | None = None) -> None: ...


class Scorer:
    """A queue of texts, of which the first ones get slots and blocks beside the running sequences.

    pooling: how texts are embedded, if the model can.
    """

    def __init__(self, scheduler: Scheduler, pooling: Pooling | None = None) -> None:
        self._scheduler = scheduler
        self._pooling = pooling
        self._jobs: deque[_Job] = deque()
        self._scored: list[tuple[str, Score]] = []
        self._embedded: list[tuple[str, F32]] = []

    @property
    def has_work(self) -> bool:
        return bool(self._jobs)

    @property
    def adapters(self) -> set[int]:
        """The adapters of the texts that are not done."""
        return {job.adapter for job in self._jobs}

    @property
    def waiting_ids(self) -> list[str]:
        """The requests of the texts that have no slot yet."""
        return [job.request_id for job in self._jobs if job.slot is None]

    def add(
        self,
        request_id: str,
        token_ids: list[int],
        num_top: int = 0,
        root: bytes = b"",
        salt: str = "",
        first: int = 1,
        adapter: int = 0,
        adapter_name: str = "",
    ) -> None:
        """Queue a text to score from token `first` on; `root` is the hash before its first block, with this salt.

        adapter, adapter_name: the number and the name of its LoRA adapter.
        """
        job = _Job(request_id, token_ids, num_top, first, root=root, salt=salt)
        job.adapter, job.adapter_name = adapter, adapter_name
        self._jobs.append(job)

    def add_to_embed(self, request_id: str, token_ids: list[int]) -> None:
        """Queue a text to embed; raise UnsupportedError for a model that makes no vectors."""
        if self._pooling is None:
            raise UnsupportedError("this model makes no vectors of texts")
        self._jobs.append(_Job(request_id, token_ids, embeds=True))

    def abort(self, request_id: str) -> None:
        for job in [job for job in self._jobs if job.request_id == request_id]:
            self._jobs.remove(job)
            self._release(job)

    def take(self) -> list[tuple[str, Score]]:
        """Return the scores since the last call, with the request ids."""
        scored, self._scored = self._scored, []
        return scored

    def take_rows(self) -> list[tuple[str, list[Logprobs]]]:
        """Return the new rows of texts that are not scored to their ends; the Scores of these texts will lack them."""
        taken = []
        for job in self._jobs:
            if job.rows:
                taken.append((job.request_id, job.rows))
                job.rows = []
        return taken

    def take_embedded(self) -> list[tuple[str, F32]]:
        """Return the vectors that were made since the last call, with the request ids."""
        embedded, self._embedded = self._embedded, []
        return embedded

    def step(self, runner: ScoreRunner) -> None:
        """Compute a chunk of the first text and of those of its kind behind it that have room; no step is in flight."""
        chunks = self._choose(runner)
        # A first text that finds no room stops admission, until running sequences give blocks back or end.
        self._scheduler.hold = not chunks
        if not chunks:
            return
        plan = self._plan(chunks)
        if chunks[0].job.embeds:
            assert isinstance(runner, EmbeddingRunner), "it has the capability vectors"
            self._embed(runner, plan, chunks)
        else:
            self._score(runner, plan, chunks)
        if plan.scored is not None:
            self._scheduler.cache.forgetting.add_scores(plan.scored)
        for chunk in chunks:
            chunk.job.done += chunk.count
            self._cache_blocks(chunk.job)
            if chunk.job.done == chunk.job.end:
                self._finish(chunk.job)

    def _choose(self, runner: ScoreRunner) -> list[_Chunk]:
        """Return the texts of the next step, with room for their tokens."""
        chunks: list[_Chunk] = []
        budget = self._scheduler.config.max_num_batched_tokens
        for job in self._jobs:
            if not budget or job.kind != self._jobs[0].kind:
                break
            if job.slot is None:
                found = [] if job.embeds else self._scheduler.prefixes.find_text(job, job.token_ids[: job.first - 1])
                job.slot = self._scheduler.reserve(len(job.token_ids), found)
                if job.slot is None:
                    break
                job.done = len(found) * self._scheduler.cache.block_size
                runner.reset_slot(job.slot, None)  # the slot's last sequence may have had penalties
            count = self._scheduler.cache.extend(job.slot, job.done, min(budget, job.end - job.done))
            if not count:
                break
            chunks.append(_Chunk(job, count))
            budget -= count
        return chunks

    def _score(self, runner: ScoreRunner, plan: StepPlan, chunks: list[_Chunk]) -> None:
        targets = np.array(
            [token for chunk in chunks for token in chunk.job.token_ids[chunk.job.done + 1 :][: chunk.count]], np.int32
        )
        top = chunks[0].job.num_top
        if top:
            rows = _with_top(runner, plan, targets, top)
            logprobs, argmax = [row.logprob for row in rows], [row.top[0][0] for row in rows]
        else:
            rows, found = [], runner.score(plan, targets)
            logprobs, argmax = found[0].tolist(), found[1].tolist()
        at = 0
        for chunk in chunks:
            part = slice(at + chunk.num_unscored, at + chunk.count)
            chunk.job.logprobs += logprobs[part]
            chunk.job.argmax += argmax[part]
            chunk.job.rows += rows[part]
            at += chunk.count

    def _cache_blocks(self, job: _Job) -> None:
        """Cache the computed blocks of a scored text, before any of them are given back."""
        if job.slot is not None and not job.embeds:
            ids = np.array(job.token_ids[: job.done], np.int32)
            self._scheduler.prefixes.cache_text(job.slot, job, ids, job.salt, job.adapter_name)

    def _embed(self, runner: EmbeddingRunner, plan: StepPlan, chunks: list[_Chunk]) -> None:
        assert self._pooling is not None, "nothing is embedded without"
        hidden = runner.embed(plan)
        at = 0
        for chunk in chunks:
            count = len(_rows_of(chunk, self._pooling))
            if count:
                found = hidden[at : at + count].astype(np.float64).sum(axis=0)
                chunk.job.vector = found if chunk.job.vector is None else chunk.job.vector + found
            at += count

    def _finish(self, job: _Job) -> None:
        self._jobs.remove(job)
        self._release(job)
        if not job.embeds:
            self._scored.append((job.request_id, Score(job.logprobs, job.argmax, job.rows)))
            return
        assert self._pooling is not None and job.vector is not None, "its rows were computed"
        vector = job.vector / len(job.token_ids) if self._pooling.kind == "mean" else job.vector
        if self._pooling.normalize:
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
        self._embedded.append((job.request_id, vector.astype(np.float32)))

    def _plan(self, chunks: list[_Chunk]) -> StepPlan:
        """Return the plan of a step that computes chunks of texts to score or to embed.

        Its logits rows are all rows of scored texts, or those rows of embedded texts from which the vector is made.
        """
        cache = self._scheduler.cache
        slots = np.array([chunk.job.slot for chunk in chunks])
        counts = np.array([chunk.count for chunk in chunks], np.int64)
        begins = np.array([chunk.job.done for chunk in chunks], np.int64)
        ends = begins + counts
        starts = np.zeros(len(chunks) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        positions = np.concatenate([np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)])
        of_row = np.repeat(slots, counts)
        block = positions // cache.block_size
        forgetting = cache.forgetting
        forgotten = forgetting.num_forgotten(slots)
        seen = ends - forgotten
        max_blocks = max(map(cache.blocks_for, seen.tolist()))
        token_ids = [token for chunk in chunks for token in chunk.job.token_ids[chunk.job.done :][: chunk.count]]
        adapters = [chunk.job.adapter for chunk in chunks]
        rows = np.arange(len(token_ids), dtype=np.int32)
        if chunks[0].job.embeds:
            assert self._pooling is not None
            chosen = [
                starts[at] + np.array(_rows_of(chunk, self._pooling), np.int32) for at, chunk in enumerate(chunks)
            ]
            rows = np.concatenate(chosen).astype(np.int32)
        return StepPlan(
            token_ids=np.array(token_ids, np.int32),
            positions=positions,
            query_start_loc=starts,
            seq_lens=seen.astype(np.int32),
            seq_slots=slots.astype(np.int32),
            logits_rows=rows,
            slot_mapping=tuple(positions + (table[of_row, block] - block) * cache.block_size for table in cache.tables),
            block_tables=forgetting.block_tables(slots, forgotten, max_blocks),
            sample=SampleRows.greedy(of_row[rows].astype(np.int32)),
            scored=forgetting.scored_queries(slots, begins, ends, starts, max_blocks),
            adapter_ids=np.array(adapters if any(adapters) else (), np.int32),
        )

    def _release(self, job: _Job) -> None:
        self._scheduler.hold = False
        if job.slot is not None:
            self._scheduler.unreserve(job.slot)


def _rows_of(chunk: _Chunk, pooling: Pooling) -> list[int]:
    """Return the rows of a chunk from which the text's vector is made."""
    if pooling.kind == "mean":
        return list(range(chunk.count))
    if pooling.kind == "first":
        return [0] if chunk.job.done == 0 else []
    return [chunk.count - 1] if chunk.is_last else []


def _with_top(runner: ScoreRunner, plan: StepPlan, targets: I32, num_top: int) -> list[Logprobs]:
    """Sample rows that allow only their target; their log probabilities are of the unmasked logits."""
    count = len(targets)
    sample = replace(
        plan.sample,
        num_logprobs=np.full(count, num_top, np.int32),
        allowed=TokenLists(np.arange(count + 1, dtype=np.int32), targets),
    )
    runner.submit(replace(plan, sample=sample))
    result = runner.wait()
    if result.error is not None:
        raise InfercError(f"the step failed: {result.error}")
    rows = [row for row in result.logprobs or () if row is not None]
    assert len(rows) == count, "every row asked for its log probabilities"
    return rows
