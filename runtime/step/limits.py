"""The bounds of a step plan, which keep compiled code inside its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from inferc.config import MOST_DRAFTED
from inferc.errors import RequestError
from inferc.runtime.step.plan import StepPlan

MAX_TOP_LOGPROBS = 64


@dataclass(frozen=True)
class StepLimits:
    """The sizes of the memory that a runner has."""

    max_num_tokens: int
    max_num_seqs: int
    max_num_rows: int
    vocab_size: int
    num_blocks: tuple[int, ...]  # of each KV group
    block_size: int
    # The read-only blocks of each group in the offload tier, numbered after its own.
    num_offloaded: tuple[int, ...] = ()
    max_num_branches: int = 0  # of trees of drafts; 0: only chains are computed

    def check(self, plan: StepPlan) -> None:
        """Raise RequestError that names what is out of bounds in the plan."""
        slot_limits = [count * self.block_size for count in self.num_blocks]
        limits = {
            f"num_tokens {plan.num_tokens}": not 0 < plan.num_tokens <= self.max_num_tokens,
            f"num_seqs {plan.num_seqs}": not 0 < plan.num_seqs - plan.num_branches <= self.max_num_seqs
            or plan.num_branches > self.max_num_branches,
            f"num_rows {len(plan.logits_rows)}": len(plan.logits_rows) > self.max_num_rows,
            "a token id": outside(plan.token_ids, self.vocab_size),
            "a logits row": outside(plan.logits_rows, plan.num_tokens),
            "a slot": any(map(outside, plan.slot_mapping, slot_limits)),
            "a block": any(map(outside, plan.block_tables, self._num_readable)),
            f"num_drafted {plan.num_drafted.max(initial=0)}": outside(plan.num_drafted, MOST_DRAFTED + 1),
            "a sequence slot": outside(plan.seq_slots, self.max_num_seqs),
            "a sampled slot": outside(plan.sample.seq_slots, self.max_num_seqs),
            "a pending slot": outside(plan.pending_slots, self.max_num_seqs),
            "num_logprobs": outside(plan.sample.num_logprobs, MAX_TOP_LOGPROBS + 1),
            "a slot to copy from": any(
                outside(copies.source, count * self.block_size)
                for copies, count in zip(plan.copies, self._num_readable, strict=False)
            ),
            "a slot to copy to": any(
                outside(copies.target, limit) for copies, limit in zip(plan.copies, slot_limits, strict=False)
            ),
            "a slot to echo": plan.tree is not None
            and any(
                outside(side, limit)
                for echo, limit in zip(plan.tree.echoes, slot_limits, strict=True)
                for side in (echo.source, echo.target)
            ),
            "a block to copy from": any(
                outside(loads.source, count) for loads, count in zip(plan.loads, self._num_readable, strict=False)
            ),
            "a block to copy to": any(
                outside(loads.target, count) for loads, count in zip(plan.loads, self.num_blocks, strict=False)
            ),
            "a listed token id": any(
                outside(lists.token_ids, self.vocab_size)
                for lists in (plan.sample.logit_bias, plan.sample.banned, plan.sample.allowed)
            ),
        }
        for what, bad in limits.items():
            if bad:
                raise RequestError(f"step plan: {what} is out of range")
        num_drafted = int(plan.num_drafted.sum())
        assert not num_drafted or len(plan.logits_rows) == len(plan.num_drafted) + num_drafted, "a row for each draft"
        assert plan.tree is None or len(plan.tree.parents) == len(plan.logits_rows), "a parent for each row"
        assert len(plan.slot_mapping) == len(plan.block_tables) == len(self.num_blocks), "one table per KV group"
        assert len(plan.positions) == plan.num_tokens == plan.query_start_loc[-1], "rows of the plan disagree"

    @property
    def _num_readable(self) -> list[int]:
        lower = self.num_offloaded or (0,) * len(self.num_blocks)
        return [count + below for count, below in zip(self.num_blocks, lower, strict=True)]


def outside(values: NDArray[Any], limit: int) -> bool:
    """Return whether any of the values is not in [0, limit)."""
    return bool(len(values)) and bool(values.size) and (int(values.min()) < 0 or int(values.max()) >= limit)
