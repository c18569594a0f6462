"""The report of `inferc explain`: the pass table, the model's phases on a device, its KV cache.

Everything is computed from a `CostLog`, which a compile leaves in the artifact and `explain_model` makes from a config.
Imports neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from inferc.cost.devices import Device
from inferc.cost.formulas import CostLog, ModelFacts, OpCost, PassCost, Step, predict
from inferc.errors import ConfigError

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


def report(costs: CostLog, device: Device, workload: Workload) -> dict[str, Any]:
    """Return JSON-able `model`, `device`, `workload`, `kv`, `phases`, `uniform_routing`, `captured` and `passes`.

    The `bytes`, `flops` and `predicted_ms` of a pass itself are those of the decode step; its `prefill` has those of
    the prefill step.
    """
    facts = costs.facts
    return {
        "model": {key: value for key, value in msgspec.structs.asdict(facts).items() if not key.startswith("kv_")},
        "device": _device(device, facts.dtype),
        "workload": asdict(workload),
        "kv": _kv(facts, device, workload.context),
        "phases": _phases(costs.last.ops, device, workload),
        "uniform_routing": any(name.startswith("experts:") for op in costs.last.ops for name, _ in op.weights),
        "captured": _row(costs.captured, device, workload),
        "passes": [_row(row, device, workload) for row in costs.passes],
    }


def _device(device: Device, dtype: str) -> dict[str, Any]:
    return {
        "name": device.name,
        "title": device.title,
        "memory_bytes": device.memory_bytes,
        "bytes_per_s": device.bytes_per_s,
        "peak_dtype": dtype if dtype in device.flops_per_s else "float32",
        "flops_per_s": device.peak(dtype),
        "ridge_flops_per_byte": device.ridge(dtype),
        "launch_us": 1e6 * device.launch_s,
        "source": device.source,
    }


def _kv(facts: ModelFacts, device: Device, context: int) -> dict[str, Any]:
    per_token, ungrouped = facts.kv_bytes_per_token, facts.kv_bytes_per_token_ungrouped
    # Blocks outside the window return to the pool, so layers with a window never hold more than the window.
    held = sum(
        group.bytes_per_token * (min(context, group.window) if group.window else context) for group in facts.kv_groups
    )
    free = device.memory_bytes - facts.weights_bytes
    fit = None if not facts.weights_bytes or not held else max(0, free // held)
    return {
        "groups": msgspec.to_builtins(facts.kv_groups),
        "bytes_per_token": per_token,
        "context": context,
        "bytes_at_context": held,
        "bytes_without_gqa": ungrouped * context if ungrouped else None,
        "gqa_saves": ungrouped / per_token if ungrouped and per_token else None,
        "sequences_that_fit": fit,
    }


def _phases(ops: Mapping[OpCost, int], device: Device, workload: Workload) -> dict[str, Any]:
    found = {}
    for name, step in (("prefill", workload.prefill), ("decode", workload.decode)):
        predicted = predict(ops, step, device)
        found[name] = {
            "num_tokens": step.num_tokens,
            "num_seqs": step.num_seqs,
            "context": step.context,
            "bytes": round(predicted.bytes),
            "weights_bytes": round(predicted.weights_bytes),
            "kv_bytes": round(predicted.cache_bytes),
            "activation_bytes": round(predicted.activation_bytes),
            "flops": round(predicted.flops),
            "flops_per_byte": predicted.flops / predicted.bytes,
            "bound": predicted.bound,
            "kernels": predicted.num_kernels,
            "memory_ms": 1e3 * predicted.memory_s,
            "compute_ms": 1e3 * predicted.compute_s,
            "launch_ms": 1e3 * predicted.launch_s,
            "predicted_ms": 1e3 * predicted.seconds,
            "tokens_per_s": step.num_tokens / predicted.seconds,
        }
    return found


def _row(row: PassCost, device: Device, workload: Workload) -> dict[str, Any]:
    header = {name: getattr(row, name) for name in ("name", "rewrites", "nodes_before", "nodes_after")}
    prefill, decode = (_numbers(row.ops, step, device) for step in (workload.prefill, workload.decode))
    return {**header, **decode, "prefill": prefill}


def _numbers(ops: Mapping[OpCost, int], step: Step, device: Device) -> dict[str, Any]:
    predicted = predict(ops, step, device)
    return {
        "bytes": round(predicted.bytes),
        "flops": round(predicted.flops),
        "predicted_ms": 1e3 * predicted.seconds,
    }
