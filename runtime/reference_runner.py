"""Runs steps with the ops' references in PyTorch, for `--target reference`: the oracle of the compiled step.

The only runtime module that imports torch, and it is imported by nobody unless asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx

from inferc import program as program_lib
from inferc.config import ResolvedEngineConfig
from inferc.program import name_of
from inferc.reference import new_kv_caches, run_step
from inferc.runtime.artifact import Artifact
from inferc.runtime.step import F32, F64, I32, Logprobs, SampleRows, StepPlan, StepResult, TokenLists
from inferc.runtime.taps import Node


class ReferenceRunner:
    """A runner whose steps run in `wait`, in the caller's thread."""

    def __init__(self, artifact: Artifact, config: ResolvedEngineConfig) -> None:
        self._program = program_lib.from_json(artifact.program["program"])
        self._caches = new_kv_caches(self._program, config.num_blocks)
        self._artifact = artifact
        self._weights: dict[str, Tensor] = {}
        vocab_size = int(artifact.model["vocab_size"])
        self._last = np.zeros(config.max_num_seqs, np.int32)
        self._in_prompt = np.zeros((config.max_num_seqs, vocab_size), np.bool_)
        self._num_output = np.zeros((config.max_num_seqs, vocab_size), np.int32)
        self._queue: deque[StepPlan] = deque()
        self._taps: dict[str, Node] = {}

    def submit(self, plan: StepPlan) -> None:
        self._queue.append(plan)

    def wait(self) -> StepResult:
        plan = self._queue.popleft()
        tapped: dict[str, Tensor] = {}
        rows = self._logits(plan, tapped)
        ids, logprobs, chosen = [], [], []
        for row, logits in enumerate(rows):
            slot = int(plan.sample.seq_slots[row])
            token = sample_row(plan.sample, row, logits, self._in_prompt[slot], self._num_output[slot])
            self._last[slot] = token
            self._num_output[slot, token] += 1
            ids.append(token)
            logprobs.append(_logprobs(logits, token, int(plan.sample.num_logprobs[row])))
            if plan.wants_logprobs:
                chosen.append(_log_softmax(logits)[token])
        of_chosen = np.array(chosen, np.float32) if plan.wants_logprobs else None
        values = _tapped_rows(plan, tapped, self._taps) if len(plan.tapped_rows) else None
        return StepResult(np.array(ids, np.int32), logprobs, chosen_logprobs=of_chosen, tapped=values)

    def reset_slot(self, slot: int, prompt_ids: I32 | None, output_ids: I32 | None = None) -> None:
        self._in_prompt[slot], self._num_output[slot] = False, 0
        if prompt_ids is not None:
            self._in_prompt[slot, prompt_ids] = True
        if output_ids is not None:
            np.add.at(self._num_output[slot], output_ids, 1)

    def score(self, plan: StepPlan, target_ids: I32) -> tuple[F32, I32]:
        logits = self._logits(plan)
        rows = np.arange(len(target_ids))
        return _log_softmax(logits)[rows, target_ids].astype(np.float32), logits.argmax(1).astype(np.int32)

    def embed(self, plan: StepPlan) -> F32:
        rows: F32 = self._step(plan)[0].float().numpy()
        return rows

    def close(self) -> None:
        self._weights.clear()

    def set_taps(self, nodes: Sequence[Node]) -> None:
        """Keep the values of these nodes for the tapped rows of every plan."""
        self._taps = {node.name: node for node in nodes}

    def _logits(self, plan: StepPlan, tapped: dict[str, Tensor] | None = None) -> F32:
        """Logits [S, vocab_size]; K and V of the step are in the caches after it. tapped: gets values by name."""
        result: F32 = self._step(plan, tapped)[1].numpy()
        return result

    def _step(self, plan: StepPlan, tapped: dict[str, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """The rows in front of the LM head, and the logits."""
        token_ids = plan.token_ids.copy()
        token_ids[plan.late_rows] = self._last[plan.late_slots]
        arrays: dict[str, NDArray[Any]] = {
            "token_ids": token_ids,
            "positions": plan.positions,
            "query_start_loc": plan.query_start_loc,
            "seq_lens": plan.seq_lens,
            "seq_slots": plan.seq_slots,
            "logits_rows": plan.logits_rows,
        }
        inputs = {name: torch.tensor(array) for name, array in arrays.items()}
        for group, cache in enumerate(self._caches):
            inputs[f"slot_mapping_{group}"] = torch.tensor(plan.slot_mapping[group])
            inputs[f"block_table_{group}"] = torch.tensor(plan.block_tables[group])
            inputs[f"kv_cache_{group}"] = cache

        def observe(node: fx.Node, value: Any) -> None:
            if (name := name_of(node)) in self._taps and tapped is not None and isinstance(value, Tensor):
                tapped[name] = value.clone()

        hidden, logits = run_step(self._program, inputs, self._read_weight, observe if self._taps else None)
        return hidden, logits

    def _read_weight(self, name: str) -> Tensor:
        """A weight of the artifact; a reference artifact stores every one in its logical layout."""
        if name not in self._weights:
            array = self._artifact.weight(name).copy()
            dtype = getattr(torch, next(row.dtype for row in self._artifact.weights if row.name == name))
            self._weights[name] = torch.from_numpy(array).view(dtype)
        return self._weights[name]


def _tapped_rows(plan: StepPlan, values: dict[str, Tensor], nodes: dict[str, Node]) -> dict[str, NDArray[Any]]:
    """Of values with a row for each token or each logits row, the tapped ones; bfloat16 as its bits."""
    of_tokens = torch.from_numpy(plan.tapped_rows)
    of_logits = torch.from_numpy(plan.tapped_logits)
    found = {}
    for name, value in values.items():
        rows = value[of_logits if nodes[name].by_logits_row else of_tokens]
        found[name] = (rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows).numpy()
    return found


def sample_row(rows: SampleRows, row: int, logits: F32, in_prompt: NDArray[np.bool_], num_output: I32) -> int:
    """The id chosen for one row of logits [vocab_size], as the compiled sampler chooses it."""
    x = _processed(rows, row, logits, in_prompt, num_output)
    temperature = float(rows.temperature[row])
    if temperature == 0.0:
        return int(x.argmax())
    p = np.exp((x - x.max()) / np.float32(temperature)).astype(np.float64)
    kept = _kept(x, p, int(rows.top_k[row]), float(rows.top_p[row]), float(rows.min_p[row]))
    seen = np.cumsum(np.where(kept, p, 0.0))
    goal = uniform(int(rows.seeds[row]), int(rows.counters[row])) * seen[-1]
    return min(int(np.searchsorted(seen, goal, side="right")), int(np.flatnonzero(kept)[-1]))


def _processed(rows: SampleRows, row: int, logits: F32, in_prompt: NDArray[np.bool_], num_output: I32) -> F32:
    """Logits after penalties, bias and masks."""
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
    """Which tokens may be drawn: top-k (equal ones at its edge included), then top-p of their mass, then min-p."""
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


def uniform(seed: int, counter: int) -> float:
    """Uniform in [0, 1) from Philox 4x32-10 at (seed, counter). Source: Salmon et al. 2011."""
    low = 0xFFFFFFFF
    keys = [seed & low, seed >> 32 & low]
    words = [counter & low, counter >> 32 & low, 0, 0]
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


def _log_softmax(logits: F32) -> F64:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(-1, keepdims=True)))


def _logprobs(logits: F32, token: int, count: int) -> Logprobs | None:
    if not count:
        return None
    values = _log_softmax(logits)
    best = np.argsort(-logits, kind="stable")[:count].tolist()
    rank = 1 + int((logits > logits[token]).sum())
    return Logprobs(token, float(values[token]), rank, tuple((token, float(values[token])) for token in best))
