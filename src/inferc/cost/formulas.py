"""The costs of a program as formulas: the bytes that its ops move and their arithmetic, over the sizes of a step.

A formula is a sum of coefficients times quantities of a step, so the costs of a program after a pass are a short table
of numbers. An artifact stores it, and any step on any device can be predicted from it. Imports no torch: cost/ops.py
makes the table from a Program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from inferc.cost.devices import Device
from inferc.manifest_types import read_typed

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


class CachedLayers(Struct, frozen=True, forbid_unknown_fields=True):
    """A group of layers whose K and V are alike: how many there are, and the bytes that all of them cache per token."""

    kind: str
    layers: int
    num_kv_heads: int
    head_dim: int
    window: int
    bytes_per_token: int


class ModelSummary(Struct, frozen=True, forbid_unknown_fields=True):
    """The name and the sizes of a model, without its KV cache."""

    model_type: str
    architecture: str
    dtype: str
    num_layers: int
    num_parameters: int
    max_model_len: int
    weights_bytes: int


class ModelFacts(ModelSummary, frozen=True, forbid_unknown_fields=True):
    """The facts of a model that do not depend on the device it runs on."""

    kv_groups: tuple[CachedLayers, ...]
    kv_bytes_per_token: int
    kv_bytes_per_token_ungrouped: int  # as if every query head had K and V of its own (no GQA)


class StoredOp(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """An `OpCost` whose formulas are written as tables."""

    op: str
    dtype: str
    kernel: str = ""
    weights: dict[str, int] = {}
    cache: dict[str, int] = {}
    activations: dict[str, int] = {}
    flops: dict[str, int] = {}


class StoredPass(Struct, frozen=True, forbid_unknown_fields=True):
    """A `PassCost` whose ops are pairs: the index of an op, and how often it occurs."""

    name: str
    rewrites: int
    nodes_before: int
    nodes_after: int
    ops: list[tuple[Annotated[int, Meta(ge=0)], int]]


class StoredCosts(Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of graph/costs.json: a `CostLog` in which each distinct op is written once."""

    facts: ModelFacts
    ops: list[StoredOp]
    programs: Annotated[list[StoredPass], Meta(min_length=1)]  # as captured, and after every pass


@dataclass(frozen=True)
class CostLog:
    """The facts of a model, and the costs of its program as captured and after every pass."""

    facts: ModelFacts
    captured: PassCost
    passes: tuple[PassCost, ...]

    @property
    def last(self) -> PassCost:
        return (self.captured, *self.passes)[-1]

    @property
    def stored(self) -> StoredCosts:
        """The costs as the artifact has them; `load` reads them back."""
        everything = (self.captured, *self.passes)
        ops = {op: index for index, op in enumerate(dict.fromkeys(op for row in everything for op in row.ops))}
        rows = [
            StoredPass(
                row.name,
                row.rewrites,
                row.nodes_before,
                row.nodes_after,
                [(ops[op], count) for op, count in row.ops.items()],
            )
            for row in everything
        ]
        return StoredCosts(self.facts, [_stored_op(op) for op in ops], rows)

    @staticmethod
    def load(data: bytes) -> CostLog:
        """Return the costs that a file holds. Raises ValueError, naming the field, for a file of another form."""
        stored = read_typed(data, StoredCosts)
        ops = [_op_cost(op) for op in stored.ops]
        captured, *passes = (_pass_cost(row, ops) for row in stored.programs)
        return CostLog(stored.facts, captured, tuple(passes))


FORMULAS = ("weights", "cache", "activations", "flops")


def _stored_op(op: OpCost) -> StoredOp:
    return StoredOp(op.op, op.dtype, op.kernel, *(dict(getattr(op, name)) for name in FORMULAS))


def _op_cost(stored: StoredOp) -> OpCost:
    formulas = {name: tuple(getattr(stored, name).items()) for name in FORMULAS}
    return OpCost(stored.op, stored.dtype, **formulas, kernel=stored.kernel)


def _pass_cost(stored: StoredPass, ops: Sequence[OpCost]) -> PassCost:
    for index, _ in stored.ops:
        if index >= len(ops):
            raise ValueError(f"programs: {stored.name} names op {index} of {len(ops)}")
    counts = {ops[index]: count for index, count in stored.ops}
    return PassCost(stored.name, stored.rewrites, stored.nodes_before, stored.nodes_after, counts)


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

    def group(one: CachedLayers, two: CachedLayers) -> CachedLayers:
        size = scaled(one.bytes_per_token, two.bytes_per_token)
        return replace(one, layers=scaled(one.layers, two.layers), bytes_per_token=size)

    few, many = short.facts, longer.facts
    counted = ("num_layers", "num_parameters", "weights_bytes", "kv_bytes_per_token", "kv_bytes_per_token_ungrouped")
    sizes = {name: scaled(getattr(few, name), getattr(many, name)) for name in counted}
    groups = tuple(group(*pair) for pair in zip(few.kv_groups, many.kv_groups, strict=True))
    facts = replace(many, kv_groups=groups, **sizes)
    rows = [row(*pair) for pair in zip(short.passes, longer.passes, strict=True)]
    return CostLog(facts, row(short.captured, longer.captured), tuple(rows))
