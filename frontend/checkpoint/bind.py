"""The binding of checkpoint tensors to a model's parameters, as lazy weight expressions.

transformers describes how checkpoints differ from its modules (renamed tensors, one tensor per expert where the module
has one for all) as a list of conversions, which it runs on data. The same list is read here and applied to expressions.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from inferc.errors import ArtifactError, UnsupportedError
from inferc.frontend.checkpoint import unreadable
from inferc.frontend.checkpoint.load import Checkpoint
from inferc.frontend.checkpoint.mtp_layers import mtp_layers
from inferc.frontend.checkpoint.safetensors import TensorSpec
from inferc.ir import weights as weight_lib
from inferc.ir.program import dtype_name
from inferc.ir.weights import Weight

log = logging.getLogger(__name__)

COMPARE_BYTES = 64 << 20
MXFP4_PARTS = ("_blocks", "_scales")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass
class Binding:
    """The expressions of a model's parameters by name, in the checkpoint's dtype, and the tensors left over."""

    weights: dict[str, Weight] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)  # checkpoint tensors that the model class declares ignorable


@dataclass
class _Group:
    """The checkpoint tensors that one conversion turns into one or several parameters."""

    converter: Any
    sources: dict[str, list[Weight]] = field(default_factory=lambda: defaultdict(list))


def bind(model: Any, checkpoint: Checkpoint) -> Binding:
    """Bind every parameter and persistent buffer of `model` (on the meta device) to the checkpoint.

    Tied parameters that the checkpoint stores twice with different values are untied in `model`.
    Raises ArtifactError for a tensor that is missing, superfluous or of another shape.
    """
    specs = {name: tensor for name, tensor in model.state_dict().items()}
    if checkpoint.module is not None:
        binding = Binding({name: _source(name, spec) for name, spec in checkpoint.tensors.items()})
        unused: list[str] = []
    else:
        _refuse_packed(checkpoint, specs)
        binding, unused = _convert(model, checkpoint.tensors, specs)
        _tie(model, binding, checkpoint)
    _check(model, specs, binding, unused, checkpoint)
    return binding


def _source(name: str, spec: TensorSpec) -> Weight:
    return weight_lib.source(name, *spec)


def _convert(model: Any, tensors: dict[str, TensorSpec], specs: dict[str, Any]) -> tuple[Binding, list[str]]:
    """Apply transformers' conversions to the checkpoint's names, and return the binding and the names without a use."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    own = getattr(model, "weight_conversions", None)  # of heads
    mapping = get_model_conversion_mapping(model) if own is None else own()
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    prefix = model.base_model_prefix
    binding, unused = Binding(), []
    packed = _unpacked(tensors)
    for name, weight in packed.items():
        target, _ = rename_source_key(name, renamings, converters, prefix, specs)
        binding.weights[target] = weight
    groups: dict[str, _Group] = {}
    for name in sorted(tensors, key=dot_natural_key):
        if name.endswith(MXFP4_PARTS) and name.rpartition("_")[0] in packed:
            continue
        target, pattern = rename_source_key(name, renamings, converters, prefix, specs)
        if target not in specs and name in specs:
            target, pattern = rename_source_key(name, [], [], prefix, specs)
        if target not in specs:
            unused.append(name)
        elif pattern is None:
            binding.weights[target] = _source(name, tensors[name])
        else:
            group = groups.setdefault(target, _Group(by_pattern[pattern]))
            group.sources[pattern].append(_source(name, tensors[name]))
    for target, group in groups.items():
        binding.weights.update(_apply(model, target, group))
    return binding, unused


def _unpacked(tensors: dict[str, TensorSpec]) -> dict[str, Weight]:
    """Return the values of experts in MXFP4 (gpt-oss), by the tensors' names without `_blocks`.

    Stored rows are outputs, [num_experts, out, in / 32, 16]; transformers' modules have [num_experts, in, out].
    """
    found = {}
    for name in tensors:
        base, _, kind = name.rpartition("_")
        if kind != "blocks" or f"{base}_scales" not in tensors:
            continue
        try:
            numbers = weight_lib.mxfp4(*(_source(part, tensors[part]) for part in (name, f"{base}_scales")))
        except ValueError as error:
            raise ArtifactError(
                f"{base}: not MXFP4 ({error}); the checkpoint needs a newer inferc, or is damaged"
            ) from error
        found[base] = weight_lib.permute(numbers, (0, 2, 1)) if len(numbers.shape) == 3 else numbers
    return found


def _apply(model: Any, target: str, group: _Group) -> dict[str, Weight]:
    """Run a conversion's operations on expressions, and return the parameters' full names and their expressions."""
    values: dict[str, list[Weight]] = dict(group.sources)
    sources, targets = list(group.converter.source_patterns), list(group.converter.target_patterns)
    for operation in group.converter.operations:
        values = _operation(model, target, operation, values, sources, targets)
    found = next(pattern for pattern in values if pattern in target)
    prefix, _, suffix = target.partition(found)
    return {prefix + pattern + suffix: value[0] for pattern, value in values.items()}


def _operation(
    model: Any, target: str, operation: Any, values: dict[str, list[Weight]], sources: list[str], targets: list[str]
) -> dict[str, list[Weight]]:
    """Apply one operation of transformers.core_model_loading, selected by its class's name.

    Patterns name the values as they do there.
    """
    kind = type(operation).__name__
    first = next(iter(values.values()))[0]
    try:
        if kind == "MergeModulelist" and operation.dim == 0:
            names = targets if len(values) == 1 else list(values)
            for value in values.values():
                _require_equal(weight.shape for weight in value)
            return {name: [weight_lib.stack(tuple(value))] for name, value in zip(names, values.values(), strict=False)}
        if kind == "Concatenate":
            parts = [weight for pattern in sources for weight in values.get(pattern, [])]
            dim = operation.dim % len(first.shape)
            _require_equal(part.shape[:dim] + part.shape[dim + 1 :] for part in parts)
            return {targets[0]: [weight_lib.concat(tuple(parts), dim)]}
        if kind == "Chunk" and getattr(operation, "num_shards_attribute", None) is None:
            dim = operation.dim % len(first.shape)
            return _split(first, dim, targets, [first.shape[dim] // len(targets)] * len(targets))
        if kind == "Split":
            names = [target.replace(targets[0], name) for name in targets]
            dim = operation.dim % len(first.shape)
            return _split(first, dim, targets, [model.get_parameter(name).shape[dim] for name in names])
        if kind == "Transpose":
            name = targets[0] if len(targets) == 1 else sources[0]
            if operation.check_dims and first.shape == tuple(model.get_parameter(target).shape):
                return {name: [first]}
            perm = list(range(len(first.shape)))
            perm[operation.dim0], perm[operation.dim1] = perm[operation.dim1], perm[operation.dim0]
            return {name: [weight_lib.permute(first, tuple(perm))]}
    except (IndexError, ValueError) as error:
        raise ArtifactError(
            f"{target}: the checkpoint's tensors do not go together ({kind}: {error}); is one missing, or a file?"
        ) from error
    raise UnsupportedError(
        f"{target}: the checkpoint needs the conversion {kind}, which is not built; re-save the model"
    )


def _require_equal(shapes: Iterable[tuple[int, ...]]) -> None:
    different = sorted(set(shapes))
    if len(different) > 1:
        raise ValueError(f"shapes {list(different[0])} and {list(different[1])}")


def _split(weight: Weight, dim: int, names: list[str], sizes: list[int]) -> dict[str, list[Weight]]:
    out, start = {}, 0
    for name, size in zip(names, sizes, strict=True):
        out[name] = [weight_lib.slice_(weight, dim, start, start + size)]
        start += size
    return out


def _tie(model: Any, binding: Binding, checkpoint: Checkpoint) -> None:
    """Give tied parameters one expression, from whichever of them the checkpoint holds."""
    for target, source in dict(getattr(model, "all_tied_weights_keys", None) or {}).items():
        if source in binding.weights and target in binding.weights:
            if not _equal(binding.weights[source], binding.weights[target], checkpoint):
                log.warning(
                    "%s and %s are tied by the config but differ in %s: kept apart", source, target, checkpoint.name
                )
                _untie(model, target)
        elif target in binding.weights:
            binding.weights[source] = binding.weights[target]
        elif source in binding.weights:
            binding.weights[target] = binding.weights[source]


def _equal(first: Weight, second: Weight, checkpoint: Checkpoint) -> bool:
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    count = weight_lib.num_rows(first)
    step = max(1, COMPARE_BYTES * count // max(1, first.num_bytes))
    for start in range(0, count, step):
        stop = min(start + step, count)
        rows = [weight_lib.read_rows(weight, checkpoint.reader, start, stop) for weight in (first, second)]
        if not torch.equal(*rows):
            return False
    return True


def _untie(model: Any, name: str) -> None:
    path, _, attribute = name.rpartition(".")
    owner = model.get_submodule(path)
    setattr(owner, attribute, torch.nn.Parameter(torch.empty_like(getattr(owner, attribute)), requires_grad=False))


def _refuse_packed(checkpoint: Checkpoint, specs: dict[str, Any]) -> None:
    """Raise UnsupportedError for a checkpoint that is quantized though its config.json does not say so."""
    packed = unreadable.packed_tensor(name for name in checkpoint.tensors if name not in specs)
    if packed is None:
        return
    name, kind = packed
    if kind == "LoRA":
        raise UnsupportedError(f"{checkpoint.name}: {name}: {unreadable.ADAPTER}")
    raise UnsupportedError(
        f"{checkpoint.name}: {name}: {unreadable.a(kind)} checkpoint, whose packed weights are not read yet; use the"
        " original, unquantized model"
    )


def _check(model: Any, specs: dict[str, Any], binding: Binding, unused: list[str], checkpoint: Checkpoint) -> None:
    where, kind = checkpoint.name, type(model).__name__
    optional = _any_of(getattr(model, "_keys_to_ignore_on_load_missing", None))
    missing = [name for name in specs if name not in binding.weights and not (optional and optional.search(name))]
    if missing:
        if wrapped := unreadable.wrapped(unused, specs):
            raise ArtifactError(f"{where}: {wrapped}")
        head = unreadable.missing_head(model, missing)
        names = "" if head else unreadable.other_names(unused, len(checkpoint.tensors), specs)
        if names:
            raise ArtifactError(
                f"{where}: {names}: they are of another model than config.json's {kind}, or a part of a larger one;"
                " give a checkpoint whose names transformers loads into that class, or the config.json of this one"
            )
        raise ArtifactError(
            f"{where}: {head}"
            if head
            else f"{where}: no tensor for {missing[0]}{_more(missing)}; the checkpoint is incomplete or of another"
            f" model than config.json ({kind}): is a file of it missing, or is config.json another's?"
        )
    _check_dtypes(specs, binding, where)
    for name, weight in binding.weights.items():
        expected = tuple(specs[name].shape) if name in specs else weight.shape
        if weight.shape != expected:
            names = next(weight.sources()).name
            raise ArtifactError(
                f"{where}: tensor {names} gives {name} the shape {list(weight.shape)}, config.json expects"
                f" {list(expected)}; config and weights are of different models"
            )
    ignorable = _any_of(getattr(model, "_keys_to_ignore_on_load_unexpected", None), *_old_buffers(model))
    of_mtp = {name for layer in mtp_layers(checkpoint.config, unused) for name in layer}
    binding.ignored = [
        name
        for name in unused
        if (ignorable and ignorable.search(name))
        or name in of_mtp
        or unreadable.is_old_mask(name, checkpoint.tensors[name][0])
    ]
    others = [name for name in unused if unreadable.OTHER_HEAD.search(name) and name not in binding.ignored]
    if others:
        log.warning("%s: %s%s are of another task, and are left out", where, others[0], _more(others))
    binding.ignored += others
    unexpected = [name for name in unused if name not in set(binding.ignored)]
    if unexpected:
        raise ArtifactError(
            f"{where}: tensor {unexpected[0]}{_more(unexpected)} has no use in {kind}; config and weights"
            " are of different models, or the checkpoint needs a newer transformers"
        )
    if binding.ignored:
        log.info("%s: %d tensors left out: %s", where, len(binding.ignored), ", ".join(binding.ignored[:8]))


def _check_dtypes(specs: dict[str, Any], binding: Binding, where: str) -> None:
    """Raise UnsupportedError if a floating parameter is bound to integers or 8-bit floats.

    Such a tensor is quantized, and without its scales its values are wrong.
    """
    for name, weight in binding.weights.items():
        if name not in specs or not specs[name].is_floating_point():
            continue
        for leaf in _floats_from(weight):
            if leaf.dtype not in FLOATS:
                raise UnsupportedError(
                    f"{where}: tensor {leaf.name} is stored as {dtype_name(leaf.dtype)} and the model expects"
                    f" {dtype_name(specs[name].dtype)}: it looks quantized, and its scales are missing; use the"
                    " original, unquantized model"
                )


def _floats_from(weight: Weight) -> Iterator[Weight]:
    """Yield the leaves of an expression whose stored values are used as they are."""
    if weight.op == "mxfp4":
        return
    if not weight.args:
        yield weight
    for arg in weight.args:
        yield from _floats_from(arg)


def _old_buffers(model: Any) -> list[str]:
    """Return patterns of buffers that old checkpoints stored and that modules now compute."""
    buffers = [name for name, _ in model.named_buffers()]
    patterns = [r"rotary_emb\.inv_freq"] if any(name.endswith("inv_freq") for name in buffers) else []
    return patterns + ([r"(^|\.)position_ids$"] if any(name.endswith("position_ids") for name in buffers) else [])


def _any_of(patterns: Any, *more: str) -> re.Pattern[str] | None:
    every = [*sorted(patterns or ()), *more]
    return re.compile("|".join(f"({pattern})" for pattern in every)) if every else None


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
