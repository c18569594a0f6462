"""The report of `inferc explain`: the pass table, the model's phases on a device, its KV cache.

Everything is computed from a `CostLog`, which a compile leaves in the artifact and `explain_model` makes from a config.
Imports neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec import Struct, field

from inferc.cost.devices import Device
from inferc.cost.formulas import CachedLayers, CostLog, ModelFacts, ModelSummary, OpCost, PassCost, Step, predict
from inferc.errors import ConfigError
from inferc.manifest_types import PassRow

DEFAULT_INPUT_LEN = 1024
DEFAULT_CONTEXT = 4096


@dataclass(frozen=True)
class Workload:
    """The two steps that are predicted: a prefill of one prompt, and a decode step of a batch of sequences.

    The prompt has `input_len` tokens; the decode step computes one token for each of `batch` sequences.
    """

    batch: int
    context: int  # the number of tokens of each decoding sequence, the new one included
    input_len: int

    @staticmethod
    def make(batch: int, context: int | None, input_len: int | None, max_model_len: int) -> Workload:
        """Return a workload, with defaults for lengths that are None.

        Raises ConfigError for what the model cannot take.
        """
        for name, length in (("--context", context), ("--input-len", input_len)):
            if length is not None and not 1 <= length <= max_model_len:
                raise ConfigError(
                    f"{name} {length}: expected 1 to {max_model_len}, the longest sequence it is compiled for"
                )
        check_counts(batch, context, input_len)
        return Workload(
            batch=batch,
            context=min(DEFAULT_CONTEXT, max_model_len) if context is None else context,
            input_len=min(DEFAULT_INPUT_LEN, max_model_len) if input_len is None else input_len,
        )

    @property
    def prefill(self) -> Step:
        return Step.prefill(self.input_len)

    @property
    def decode(self) -> Step:
        return Step.decode(self.batch, self.context)


def check_counts(batch: int, context: int | None, input_len: int | None) -> None:
    """Raise ConfigError for a count below 1, before the work of reading a model."""
    for name, count in (("--batch", batch), ("--context", context), ("--input-len", input_len)):
        if count is not None and count < 1:
            raise ConfigError(f"{name} {count}: expected at least 1")


# ------------------------------------------------------------------------------------------------- the report

# `inferc explain --json` prints a report as it is here: the names of the fields are the keys, in this order.


class Refusal(Struct, frozen=True):
    """The pass in which a compile of the model would stop, and the reason it gives."""

    pass_name: str = field(name="pass")
    reason: str


class Subject(Struct, frozen=True):
    """The model or artifact that a report is about, as it was lowered."""

    source: str
    target: str
    captured_layers: tuple[int, ...] | None  # the layers of each model that was captured; None for an artifact
    refused: Refusal | None


class DeviceLimits(Struct, frozen=True):
    """The limits of a device for a model: its memory, and its peak in the dtype of the model."""

    name: str
    title: str
    memory_bytes: int
    bytes_per_s: float
    peak_dtype: str  # float32 if the device has no units for the dtype of the model
    flops_per_s: float
    ridge_flops_per_byte: float
    launch_us: float
    source: str


class KVCost(Struct, frozen=True):
    """The memory that the KV cache of one sequence takes, and how many sequences fit beside the weights."""

    groups: tuple[CachedLayers, ...]
    bytes_per_token: int
    context: int
    bytes_at_context: int
    bytes_without_gqa: int | None  # as if each query head had its own K and V
    gqa_saves: float | None
    sequences_that_fit: int | None  # None for a model that caches nothing


class PhaseCost(Struct, frozen=True):
    """The predicted cost of a step of the compiled program, by what it moves and by what it waits for."""

    num_tokens: int
    num_seqs: int
    context: int
    bytes: int
    weights_bytes: int
    kv_bytes: int
    activation_bytes: int
    flops: int
    flops_per_byte: float
    bound: str
    kernels: int
    memory_ms: float
    compute_ms: float
    launch_ms: float
    predicted_ms: float
    tokens_per_s: float


class Phases(Struct, frozen=True):
    """The predicted costs of the two steps of a workload."""

    prefill: PhaseCost
    decode: PhaseCost


class StepCost(Struct, frozen=True):
    """The predicted cost of a step in total."""

    bytes: int
    flops: int
    predicted_ms: float


class PassEffect(PassRow, frozen=True):
    """The effect of a pass: what it rewrites, and the predicted costs of the program after it."""

    bytes: int  # of the decode step, as the next two
    flops: int
    predicted_ms: float
    prefill: StepCost


class CostReport(Subject, frozen=True):
    """The report of `inferc explain`: a model's costs on a device, after each pass and by phase."""

    model: ModelSummary
    device: DeviceLimits
    workload: Workload
    kv: KVCost
    phases: Phases
    uniform_routing: bool  # whether the costs assume that tokens are routed to experts at random
    captured: PassEffect
    passes: tuple[PassEffect, ...]


def report(subject: Subject, costs: CostLog, device: Device, workload: Workload) -> CostReport:
    """Predict what the two steps of `workload` cost on `device`, of the compiled program and after each pass."""
    facts = costs.facts
    return CostReport(
        source=subject.source,
        target=subject.target,
        captured_layers=subject.captured_layers,
        refused=subject.refused,
        model=_summary(facts),
        device=_limits(device, facts.dtype),
        workload=workload,
        kv=_kv(facts, device, workload.context),
        phases=Phases(
            prefill=_phase(costs.last.ops, workload.prefill, device),
            decode=_phase(costs.last.ops, workload.decode, device),
        ),
        uniform_routing=any(name.startswith("experts:") for op in costs.last.ops for name, _ in op.weights),
        captured=_effect(costs.captured, device, workload),
        passes=tuple(_effect(row, device, workload) for row in costs.passes),
    )


def _summary(facts: ModelFacts) -> ModelSummary:
    return ModelSummary(**{name: getattr(facts, name) for name in ModelSummary.__struct_fields__})


def _limits(device: Device, dtype: str) -> DeviceLimits:
    return DeviceLimits(
        name=device.name,
        title=device.title,
        memory_bytes=device.memory_bytes,
        bytes_per_s=device.bytes_per_s,
        peak_dtype=dtype if dtype in device.flops_per_s else "float32",
        flops_per_s=device.peak(dtype),
        ridge_flops_per_byte=device.ridge(dtype),
        launch_us=1e6 * device.launch_s,
        source=device.source,
    )


def _kv(facts: ModelFacts, device: Device, context: int) -> KVCost:
    per_token, ungrouped = facts.kv_bytes_per_token, facts.kv_bytes_per_token_ungrouped
    # Blocks outside the window return to the pool, so layers with a window never hold more than the window.
    held = sum(
        group.bytes_per_token * (min(context, group.window) if group.window else context) for group in facts.kv_groups
    )
    free = device.memory_bytes - facts.weights_bytes
    return KVCost(
        groups=facts.kv_groups,
        bytes_per_token=per_token,
        context=context,
        bytes_at_context=held,
        bytes_without_gqa=ungrouped * context if ungrouped else None,
        gqa_saves=ungrouped / per_token if ungrouped and per_token else None,
        sequences_that_fit=None if not facts.weights_bytes or not held else max(0, free // held),
    )


def _phase(ops: Mapping[OpCost, int], step: Step, device: Device) -> PhaseCost:
    predicted = predict(ops, step, device)
    return PhaseCost(
        num_tokens=step.num_tokens,
        num_seqs=step.num_seqs,
        context=step.context,
        bytes=round(predicted.bytes),
        weights_bytes=round(predicted.weights_bytes),
        kv_bytes=round(predicted.cache_bytes),
        activation_bytes=round(predicted.activation_bytes),
        flops=round(predicted.flops),
        flops_per_byte=predicted.flops / predicted.bytes,
        bound=predicted.bound,
        kernels=predicted.num_kernels,
        memory_ms=1e3 * predicted.memory_s,
        compute_ms=1e3 * predicted.compute_s,
        launch_ms=1e3 * predicted.launch_s,
        predicted_ms=1e3 * predicted.seconds,
        tokens_per_s=step.num_tokens / predicted.seconds,
    )


def _effect(row: PassCost, device: Device, workload: Workload) -> PassEffect:
    decode = _step(row.ops, workload.decode, device)
    return PassEffect(
        name=row.name,
        rewrites=row.rewrites,
        nodes_before=row.nodes_before,
        nodes_after=row.nodes_after,
        bytes=decode.bytes,
        flops=decode.flops,
        predicted_ms=decode.predicted_ms,
        prefill=_step(row.ops, workload.prefill, device),
    )


def _step(ops: Mapping[OpCost, int], step: Step, device: Device) -> StepCost:
    predicted = predict(ops, step, device)
    return StepCost(bytes=round(predicted.bytes), flops=round(predicted.flops), predicted_ms=1e3 * predicted.seconds)
