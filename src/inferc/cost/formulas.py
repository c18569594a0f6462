"""The costs of a program as formulas: the bytes that its ops move and their arithmetic, over the sizes of a step.

A formula is a sum of coefficients times quantities of a step, so the costs of a program after a pass are a short table
of numbers. An artifact stores it, and any step on any device can be predicted from it. Imports no torch: cost/ops.py
makes the table from a Program.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from inferc.cost.devices import Device

# A formula maps quantities to coefficients, in a fixed order so that equal costs are equal keys. The quantities are:
#   1                       a constant
#   T, S, B, T*T …          tokens, logits rows and sequences of the step, and products of them
#   keys:KIND:WINDOW        cached positions that the step's sequences read in one attention layer
#   pairs:KIND:WINDOW       pairs of a query and a key that it sees, in one attention layer
#   experts:E:K:ROWS        experts out of E that ROWS tokens (T or S) touch, each choosing K
Formula = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Step:
    """The sizes of a step of `num_tokens` tokens, spread evenly over `num_seqs` sequences.

    Each sequence has `context` tokens after the step.
    """

    num_tokens: int
    num_seqs: int
    num_rows: int  # the number of rows whose logits are computed
    context: int

    @staticmethod
    def prefill(input_len: int) -> Step:
        """Return the step that computes one whole prompt."""
        return Step(input_len, 1, 1, input_len)

    @staticmethod
    def decode(num_seqs: int, context: int) -> Step:
        """Return the step that computes one new token for each of `num_seqs` sequences.

        Each sequence has `context` tokens, the new one included.
        """
        return Step(num_seqs, num_seqs, num_seqs, context)

    def quantity(self, name: str) -> float:
        kind, *rest = name.split(":")
        if kind == "keys":
            return self.num_seqs * _keys(self.context, self.num_tokens // self.num_seqs, rest[0], int(rest[1]))
        if kind == "pairs":
            before = self.context - self.num_tokens // self.num_seqs
            seen = _seen(self.context, rest[0], int(rest[1])) - _seen(before, rest[0], int(rest[1]))
            return self.num_seqs * seen
        if kind == "experts":
            return expected_experts(int(rest[0]), int(rest[1]), self.quantity(rest[2]))
        value = 1
        for factor in name.split("*"):
            value *= {"1": 1, "T": self.num_tokens, "S": self.num_rows, "B": self.num_seqs}[factor]
        return value

    def evaluate(self, formula: Formula) -> float:
        return sum(coefficient * self.quantity(name) for name, coefficient in formula)


def expected_experts(num_experts: int, top_k: int, num_rows: float) -> float:
    """Return how many experts `num_rows` tokens touch in the mean, if each picks `top_k` at random (uniform routing).

    Real routers have favourites, and touch fewer.
    """
    return float(num_experts * (1 - (1 - top_k / num_experts) ** num_rows))


def _keys(context: int, new: int, kind: str, window: int) -> int:
    """Return how many positions the last `new` queries of a sequence of `context` tokens see altogether."""
    first = context - new
    if kind == "window":
        return context - max(0, first - window + 1)
    if kind == "chunk":
        return context - first // window * window
    return context


def _seen(length: int, kind: str, window: int) -> int:
    """Return how many keys the first `length` queries of a sequence see, summed over the queries."""
    if kind == "window" and length > window:
        return _triangle(window) + (length - window) * window
    if kind == "chunk":
        return length // window * _triangle(window) + _triangle(length % window)
    return _triangle(length)


def _triangle(length: int) -> int:
    return length * (length + 1) // 2


@dataclass(frozen=True)
class OpCost:
    """The cost of one op: bytes of weights, KV cache and activations that it reads and writes, and its arithmetic."""

    op: str
    dtype: str  # the dtype of its multiplications, which decides the device's peak
    weights: Formula = ()
    cache: Formula = ()
    activations: Formula = ()
    flops: Formula = ()
    kernel: str = ""  # the name of the kernel that runs it, once one is chosen


@dataclass(frozen=True)
class PassCost:
    """The costs of the program after a pass."""

    name: str
    rewrites: int
    nodes_before: int
    nodes_after: int
    ops: Mapping[OpCost, int]  # how often each op cost occurs


@dataclass(frozen=True)
class ModelFacts:
    """The facts of a model that do not depend on the device it runs on."""

    model_type: str
    architecture: str
    dtype: str
    num_layers: int
    num_parameters: int
    max_model_len: int
    weights_bytes: int
    # Each KV group has the keys kind, layers (how many), num_kv_heads, head_dim, window and bytes_per_token.
    kv_groups: tuple[dict[str, Any], ...]
    kv_bytes_per_token: int
    kv_bytes_per_token_ungrouped: int  # as if every query head had K and V of its own (no GQA)


@dataclass(frozen=True)
class CostLog:
    """The facts of a model, and the costs of its program as captured and after every pass."""

    facts: ModelFacts
    captured: PassCost
    passes: tuple[PassCost, ...]

    @property
    def last(self) -> PassCost:
        return (self.captured, *self.passes)[-1]

    def to_json(self) -> dict[str, Any]:
        """Return JSON-able data in which each distinct op is written once; `from_json` reads it back."""
        everything = (self.captured, *self.passes)
        ops = {op: index for index, op in enumerate(dict.fromkeys(op for row in everything for op in row.ops))}
        rows = [{**_header(row), "ops": [[ops[op], count] for op, count in row.ops.items()]} for row in everything]
        return {"facts": asdict(self.facts), "ops": [_op_json(op) for op in ops], "programs": rows}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> CostLog:
        ops = [_op_load(op) for op in data["ops"]]
        captured, *passes = (
            PassCost(**{**row, "ops": {ops[index]: count for index, count in row["ops"]}}) for row in data["programs"]
        )
        facts = ModelFacts(**{**data["facts"], "kv_groups": tuple(data["facts"]["kv_groups"])})
        return CostLog(facts, captured, tuple(passes))


def _header(row: PassCost) -> dict[str, Any]:
    return {name: getattr(row, name) for name in ("name", "rewrites", "nodes_before", "nodes_after")}


FORMULAS = ("weights", "cache", "activations", "flops")


def _op_json(op: OpCost) -> dict[str, Any]:
    formulas = {name: dict(getattr(op, name)) for name in FORMULAS if getattr(op, name)}
    kernel = {"kernel": op.kernel} if op.kernel else {}
    return {"op": op.op, "dtype": op.dtype, **kernel, **formulas}


def _op_load(data: Mapping[str, Any]) -> OpCost:
    formulas = {name: tuple(data[name].items()) for name in FORMULAS if name in data}
    return OpCost(data["op"], data["dtype"], **formulas, kernel=data.get("kernel", ""))


# ------------------------------------------------------------------------------------------------- prediction


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of a step on a device.

    Every kernel takes the longer of its memory traffic and its arithmetic, plus a launch.
    """

    weights_bytes: float
    cache_bytes: float
    activation_bytes: float
    flops: float
    memory_s: float  # the time of the kernels that are bound by memory
    compute_s: float  # the time of the kernels that are bound by arithmetic
    launch_s: float
    num_kernels: int

    @property
    def bytes(self) -> float:
        return self.weights_bytes + self.cache_bytes + self.activation_bytes

    @property
    def seconds(self) -> float:
        return self.memory_s + self.compute_s + self.launch_s

    @cached_property
    def bound(self) -> str:
        """The resource, "memory" or "compute", that bounds the longer part of the step."""
        return "memory" if self.memory_s >= self.compute_s else "compute"


def predict(ops: Mapping[OpCost, int], step: Step, device: Device) -> Prediction:
    """Predict what `step` of a program of these ops moves and computes, and how long `device` takes at its limits."""
    totals = dict.fromkeys(FORMULAS, 0.0)
    memory_s = compute_s = 0.0
    for op, count in ops.items():
        values = {name: step.evaluate(getattr(op, name)) for name in FORMULAS}
        for name, value in values.items():
            totals[name] += count * value
        moving = sum(values[name] for name in FORMULAS[:3]) / device.bytes_per_s
        computing = values["flops"] / device.peak(op.dtype)
        if moving >= computing:
            memory_s += count * moving
        else:
            compute_s += count * computing
    kernels = sum(ops.values())
    bytes_moved = (totals["weights"], totals["cache"], totals["activations"])
    return Prediction(*bytes_moved, totals["flops"], memory_s, compute_s, kernels * device.launch_s, kernels)


def extended(short: CostLog, longer: CostLog, times: int) -> CostLog:
    """Return the costs of a model that has `times` more of the layers that `longer` has and `short` has not.

    Exact, as equal layers cost the same and are rewritten the same; everything but sizes is counted.
    """

    def scaled(first: int, second: int) -> int:
        return first + times * (second - first)

    def row(first: PassCost, second: PassCost) -> PassCost:
        names = ("rewrites", "nodes_before", "nodes_after")
        counts = {name: scaled(getattr(first, name), getattr(second, name)) for name in names}
        distinct = dict.fromkeys((*first.ops, *second.ops))
        ops = {op: scaled(first.ops.get(op, 0), second.ops.get(op, 0)) for op in distinct}
        return PassCost(first.name, **counts, ops={op: count for op, count in ops.items() if count})

    def groups(first: Iterable[dict[str, Any]], second: Iterable[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
        counted = ("layers", "bytes_per_token")
        return tuple(
            {**one, **{key: scaled(one[key], two[key]) for key in counted}}
            for one, two in zip(first, second, strict=True)
        )

    few, many = short.facts, longer.facts
    counted = ("num_layers", "num_parameters", "weights_bytes", "kv_bytes_per_token", "kv_bytes_per_token_ungrouped")
    facts = {**asdict(many), **{name: scaled(getattr(few, name), getattr(many, name)) for name in counted}}
    facts["kv_groups"] = groups(few.kv_groups, many.kv_groups)
    rows = [row(*pair) for pair in zip(short.passes, longer.passes, strict=True)]
    return CostLog(ModelFacts(**facts), row(short.captured, longer.captured), tuple(rows))
