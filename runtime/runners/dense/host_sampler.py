"""The sampler in numpy, for runners whose steps end with logits: it chooses the same tokens as the compiled sampler."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inferc.runtime.step.plan import F32, F64, I32, Logprobs, SampleRows, StepMasks, StepPlan, StepResult, TokenLists


class HostSampler:
    """A sampler that chooses ids from logits, and keeps each slot's last id and penalty counts between steps."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._last = np.zeros(num_slots, np.int32)
        self._in_prompt: dict[int, NDArray[np.bool_]] = {}  # key: the slot of a sequence with penalties
        self._num_output: dict[int, I32] = {}
        self._nothing = np.zeros(vocab_size, np.bool_), np.zeros(vocab_size, np.int32)

    def reset_slot(self, slot: int, prompt_ids: I32 | None, output_ids: I32 | None = None) -> None:
        """Assign `slot` to a new sequence, like Runner.reset_slot."""
        self._in_prompt.pop(slot, None)
        self._num_output.pop(slot, None)
        if prompt_ids is None:
            return
        self._in_prompt[slot] = np.zeros(self._vocab_size, np.bool_)
        self._in_prompt[slot][prompt_ids] = True
        self._num_output[slot] = np.zeros(self._vocab_size, np.int32)
        if output_ids is not None:
            np.add.at(self._num_output[slot], output_ids, 1)

    def token_ids(self, plan: StepPlan) -> I32:
        """Return the step's token ids, with the late ids that the previous step sampled filled in.

        The masks of the step begin to be made.
        """
        if plan.masks is not None:
            plan.masks.begin(self._last)
        token_ids = plan.token_ids.copy()
        token_ids[plan.pending_rows] = self._last[plan.pending_slots]
        return token_ids

    def sample(self, plan: StepPlan, logits: F32) -> StepResult:
        """Choose one id for each row of logits [S, vocab_size]."""
        rows = plan.sample
        if plan.processed is not None:
            logits = logits.copy()
            plan.processed.apply(logits)
        raw = logits
        if plan.masks is not None:
            plan.masks.wait()
            logits = _masked(plan.masks, logits)
        ids, failed = self._choose(plan, logits)
        logprobs = None
        if rows.num_logprobs.any():
            logprobs = [_logprobs(raw[row], int(ids[row]), int(rows.num_logprobs[row])) for row in range(len(ids))]
        chosen = None
        if plan.wants_logprobs:
            chosen = log_softmax(raw)[np.arange(len(ids)), ids].astype(np.float32)
        return StepResult(ids, logprobs, failed if failed.any() else None, chosen_logprobs=chosen)

    def _choose(self, plan: StepPlan, logits: F32) -> tuple[I32, NDArray[np.bool_]]:
        """Return the id of each row and whether none could be chosen, and keep those of the rows that count."""
        rows, inputs = plan.sample, plan.token_ids[plan.logits_rows]
        ids = logits.argmax(1).astype(np.int32)
        failed = ~np.isfinite(logits[np.arange(len(ids)), ids]) if len(ids) else np.zeros(0, np.bool_)
        is_plain = _is_plain(rows)
        first = last = 0  # the first row of the slot, and the last that counts
        counted: list[tuple[I32, int]] = []
        ways: list[list[int]] = []  # of the slot's rows, the ids drafted on the way to each
        bounds = np.flatnonzero(np.diff(rows.seq_slots, prepend=-1, append=-1)).tolist()
        for row, slot in enumerate(rows.seq_slots.tolist()):
            if row == bounds[0]:
                first, bounds = row, bounds[1:]
                ways = plan.drafts_of(first, bounds[0] - first)
            num_output = self._num_output.get(slot)
            if not is_plain[row]:
                chosen = (self._nothing[1] if num_output is None else num_output).copy()
                if num_output is not None:  # the ids drafted for the rows before count as chosen
                    np.add.at(chosen, np.array(ways[row - first], np.int64), 1)
                in_prompt = self._in_prompt.get(slot, self._nothing[0])
                ids[row], failed[row] = sample_row(rows, row, logits[row], in_prompt, chosen)
            parent = row - 1 if plan.tree is None else int(plan.tree.parents[row])
            if row > first and (parent != last or failed[parent] or ids[parent] != inputs[row]):
                continue
            last = row
            self._last[slot] = ids[row]
            if num_output is not None and not failed[row]:
                counted.append((num_output, int(ids[row])))
        for num_output, token in counted:  # each row has counted what was drafted before it
            num_output[token] += 1
        return ids, failed


def _masked(masks: StepMasks, logits: F32) -> F32:
    """Return the logits [S, vocab_size] with -inf for the tokens that a row's mask forbids."""
    rows = np.flatnonzero(masks.mask_rows >= 0)
    bits = np.unpackbits(masks.bits[masks.mask_rows[rows]].view(np.uint8), axis=1, bitorder="little")
    masked = logits.copy()
    masked[rows] = np.where(bits[:, : logits.shape[1]] != 0, logits[rows], np.float32(-np.inf))
    return masked


def _is_plain(rows: SampleRows) -> NDArray[np.bool_]:
    """Return for which rows the most likely token is taken without any processing of the logits."""
    plain: NDArray[np.bool_] = (rows.temperature == 0.0) & (rows.repetition_penalty == 1.0)
    plain &= (rows.presence_penalty == 0.0) & (rows.frequency_penalty == 0.0)
    for lists in (rows.logit_bias, rows.allowed, rows.banned):
        if len(lists.starts):
            plain &= np.diff(lists.starts) == 0
    return plain


def sample_row(
    rows: SampleRows, row: int, logits: F32, in_prompt: NDArray[np.bool_], num_output: I32
) -> tuple[int, bool]:
    """Return the id chosen for one row of logits [vocab_size], and whether no token could be chosen.

    The choice is that of the compiled sampler.
    """
    x = _processed(rows, row, logits, in_prompt, num_output)
    temperature, best = float(rows.temperature[row]), int(x.argmax())
    if temperature == 0.0 or not np.isfinite(x[best]):
        return best, not np.isfinite(x[best])
    p = np.exp((x - x.max()) / np.float32(temperature)).astype(np.float64)
    kept = _kept(x, p, int(rows.top_k[row]), float(rows.top_p[row]), float(rows.min_p[row]))
    if rows.typical_p[row] < 1.0:
        kept = _typical(x, kept, temperature, float(rows.typical_p[row]))
    chance = float(rows.xtc_probability[row])
    if chance and uniform(int(rows.seeds[row]), int(rows.counters[row]), XTC_STREAM) < chance:
        kept = _without_top(p, kept, float(rows.xtc_threshold[row]))
    seen = np.cumsum(np.where(kept, p, 0.0))
    goal = uniform(int(rows.seeds[row]), int(rows.counters[row])) * seen[-1]
    return min(int(np.searchsorted(seen, goal, side="right")), int(np.flatnonzero(kept)[-1])), False


def _processed(rows: SampleRows, row: int, logits: F32, in_prompt: NDArray[np.bool_], num_output: I32) -> F32:
    """Return the logits after penalties, bias and masks."""
    x = logits.copy()
    repetition = float(rows.repetition_penalty[row])
    seen = in_prompt | (num_output > 0)
    x[seen] = np.where(x[seen] > 0, x[seen] / repetition, x[seen] * repetition)
    x -= np.float32(rows.frequency_penalty[row]) * num_output
    x -= np.float32(rows.presence_penalty[row]) * (num_output > 0)
    bias, values = _row_of(rows.logit_bias, row)
    x[bias] += values
    allowed, _ = _row_of(rows.allowed, row)
    if len(allowed):
        mask = np.full(len(x), -np.inf, np.float32)
        mask[allowed] = x[allowed]
        x = mask
    banned, _ = _row_of(rows.banned, row)
    x[banned] = -np.inf
    return x


def _kept(x: F32, p: F64, top_k: int, top_p: float, min_p: float) -> NDArray[np.bool_]:
    """Return which tokens may be drawn: top-k (ties at its edge included), then top-p of their mass, then min-p."""
    kept = p > 0
    if 0 < top_k < len(p):
        kept &= x >= np.partition(x, -top_k)[-top_k]
    if top_p < 1.0:
        order = np.lexsort((np.arange(len(p)), -p))
        order = order[kept[order]]
        before = np.cumsum(p[order]) - p[order]
        kept = np.zeros(len(p), np.bool_)
        kept[order[before < top_p * p[order].sum()]] = True
        kept[order[0]] = True
    return kept & (p >= min_p)


def _typical(x: F32, kept: NDArray[np.bool_], temperature: float, share: float) -> NDArray[np.bool_]:
    """Return which of the kept tokens typical-p keeps: those with log probabilities closest to their mean."""
    ids = np.flatnonzero(kept)
    y = ((x[ids] - x.max()) / np.float32(temperature)).astype(np.float64)
    p = np.exp(y)
    away = np.abs(y - (p * y).sum() / p.sum())
    order = np.argsort(away, kind="stable")
    last = min(int((np.cumsum(p[order]) < share * p.sum()).sum()), len(ids) - 1)
    found = np.zeros(len(kept), np.bool_)
    found[ids[away <= away[order[last]]]] = True
    return found


def _without_top(p: F64, kept: NDArray[np.bool_], share: float) -> NDArray[np.bool_]:
    """Return the kept tokens that XTC leaves: of those with a share of the mass, only the least likely, last one."""
    top = np.flatnonzero(kept & (p >= share * p[kept].sum()))
    found = kept.copy()
    if len(top):
        found[top] = False
        found[top[np.flatnonzero(p[top] == p[top].min())[-1]]] = True
    return found


XTC_STREAM = 1  # of a row's random numbers: 0 has those of the draw


def uniform(seed: int, counter: int, stream: int = 0) -> float:
    """Return a number uniform in [0, 1) from Philox 4x32-10 at (seed, counter, stream). Source: Salmon et al. 2011."""
    low = 0xFFFFFFFF
    keys = [seed & low, seed >> 32 & low]
    words = [counter & low, counter >> 32 & low, stream, 0]
    for _ in range(10):
        a, b = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [b >> 32 ^ words[1] ^ keys[0], b & low, a >> 32 ^ words[3] ^ keys[1], a & low]
        keys = [(keys[0] + 0x9E3779B9) & low, (keys[1] + 0xBB67AE85) & low]
    return ((words[0] << 32 | words[1]) >> 11) * 2.0**-53


def _row_of(lists: TokenLists, row: int) -> tuple[I32, F32]:
    if not len(lists.starts):
        return np.zeros(0, np.int32), np.zeros(0, np.float32)
    part = slice(int(lists.starts[row]), int(lists.starts[row + 1]))
    return lists.token_ids[part], lists.values[part]


def log_softmax(logits: F32) -> F64:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(-1, keepdims=True)))


def _logprobs(logits: F32, token: int, count: int) -> Logprobs | None:
    if not count:
        return None
    values = log_softmax(logits)
    best = np.argsort(-logits, kind="stable")[:count].tolist()
    rank = 1 + int((logits > logits[token]).sum())
    return Logprobs(token, float(values[token]), rank, tuple((token, float(values[token])) for token in best))
