"""The landing of a step: its sequences get the tokens that they sampled, and those that end with them end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from inferc.runtime.kv_cache.manager import KVCacheManager
from inferc.runtime.scheduler.batch import Batch
from inferc.runtime.scheduler.drafts import NoDrafts, taken
from inferc.runtime.scheduler.prefix_cache import PrefixCache
from inferc.runtime.step.forecast import Forecast
from inferc.runtime.step.plan import I32, Logprobs, StepPlan, StepResult
from inferc.runtime.step.sequence import Output, Sequence, Status, StepOutputs


class Landing:
    """The landing of steps on the batch.

    begin: called with a sequence that got its first token. end: called with one that got its last.
    charge: called with one that got more tokens in a step than one, and how many more.
    """

    def __init__(
        self,
        batch: Batch,
        cache: KVCacheManager,
        prefixes: PrefixCache,
        drafts: NoDrafts,
        forecast: Forecast,
        begin: Callable[[Sequence], None],
        end: Callable[[Sequence], None],
        charge: Callable[[Sequence, int], None],
    ) -> None:
        self._batch, self._cache, self._prefixes, self._drafts = batch, cache, prefixes, drafts
        self._forecast, self._begin, self._end, self._charge = forecast, begin, end, charge

    def land(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        """Append the tokens of the oldest step in flight to its sequences, and end those that end with them."""
        if len(plan.num_drafted):
            return self._append_taken(plan, result)
        return self._append(plan.sample.seq_slots, result)

    def _append(self, seq_slots: I32, result: StepResult) -> StepOutputs:
        batch, ids, rows_of = self._batch, result.token_ids, self._batch.rows_of(seq_slots)
        slots, seqs = rows_of.slots, rows_of.seqs
        known = batch.num_known[slots]
        batch.tokens[slots, known] = ids
        if batch.logprobs is not None:
            batch.logprobs[slots, known] = result.chosen_logprobs
        known += 1
        batch.num_known[slots] = known
        stopped = rows_of.stopped(ids)
        ended = stopped | (known >= rows_of.max_total)
        is_first = known == rows_of.first_len
        forgetting = self._cache.forgetting
        has_more = ended | is_first | ~batch.is_running[slots] | forgetting.changes_at(known - 2)
        if result.failed is not None:
            has_more |= result.failed
        rows = range(len(slots)) if result.logprobs is not None else np.flatnonzero(has_more).tolist()
        others: dict[int, Output | None] = {}
        for row in rows:
            seq, token = seqs[row], int(ids[row])
            # The sequence ended while this step was in flight, so the token is dropped.
            if seq.status is Status.FINISHED:
                others[row] = None
                continue
            output = others[row] = Output(seq.request_id, seq.index, [token])
            if result.failed is not None and result.failed[row]:
                output.token_ids, output.finish_reason = [], "error"
                batch.num_known[slots[row]] -= 1
                self._end(seq)
                continue
            if seq.status is Status.WAITING:  # preempted while this step was in flight
                seq.token_ids.append(token)
                if result.chosen_logprobs is not None:
                    seq.logprobs.append(float(result.chosen_logprobs[row]))
            if result.logprobs is not None and (logprob := result.logprobs[row]) is not None:
                output.logprobs = _asked(seq, [logprob])
            output.num_forgotten = forgetting.num_forgotten_at(int(known[row]) - 2)
            if is_first[row]:
                self._note_first(output, seq)
            if ended[row]:
                output.finish_reason = "stop" if stopped[row] else "length"
                self._end(seq)
                self._forecast.lengths.learn(seq)
        return StepOutputs(seqs, ids, others)

    def _append_taken(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        """Append the tokens of a step some of which were drafted, and before which every token was known."""
        batch, found = self._batch, taken(plan, result, self._batch)
        seqs: list[Sequence] = []
        others: dict[int, Output | None] = {}
        for row, each in enumerate(found):
            seq = batch.seqs[each.slot]
            assert seq is not None and seq.status is not Status.WAITING, "no step was scheduled meanwhile"
            seqs.append(seq)
            if each.num_drafted:
                self._drafts.landed(each.slot, each.num_drafted, each.ids, each.num_accepted)
            known = batch.advance(each.slot, each.ids, result.chosen_logprobs, each.rows)
            if seq.status is Status.FINISHED:  # aborted while this step was in flight
                others[row] = None
                continue
            self._drafts.choose(each.slot, plan, each.rows)
            output = others[row] = Output(seq.request_id, seq.index, each.ids)
            if len(each.ids) > 1:
                self._charge(seq, len(each.ids) - 1)
            of_rows = [] if result.logprobs is None else [result.logprobs[at] for at in each.rows]
            if own := [one for one in of_rows if one is not None]:
                output.logprobs = _asked(seq, own)
            if each.ids and known - len(each.ids) == seq.prompt_len:
                self._note_first(output, seq)
            is_stopped = bool(each.ids) and each.ids[-1] in seq.stop_ids
            if each.is_failed:
                output.finish_reason = "error"
                self._end(seq)
            elif is_stopped or known >= batch.max_total[each.slot]:
                output.finish_reason = "stop" if is_stopped else "length"
                self._end(seq)
                self._forecast.lengths.learn(seq)
            else:
                self._prefixes.cache_full_blocks(each.slot, int(batch.num_computed[each.slot]))
        self._drafts.end_step()
        return StepOutputs(seqs, np.zeros(len(found), np.int32), others)

    def _note_first(self, output: Output, seq: Sequence) -> None:
        output.num_cached, output.queue_seconds = seq.num_cached, seq.admitted_at - seq.arrived
        self._begin(seq)


def _asked(seq: Sequence, rows: list[Logprobs]) -> list[Logprobs]:
    """Return the log probabilities as the request asked for them: with the most likely tokens, or without."""
    return rows if seq.params.logprobs else [replace(row, top=()) for row in rows]
