"""The comparison of one request on an artifact's engine with the Hugging Face model, layer by layer.

The engine runs the request as it serves it, with taps on each layer's output and on the logits. The model then reads
the same tokens, in the artifact's dtype and, where it fits in memory, in float32. The float32 run is the judge: an
artifact may be as far from it as `drift` allows its dtype or its quantization scheme. This module imports every stage,
as certify.py does.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

import inferc
from inferc.compiler import drift
from inferc.errors import ConfigError, RequestError, UnsupportedError
from inferc.frontend.checkpoint.load import Checkpoint, load
from inferc.frontend.reference import reference_greedy, reference_model, reference_states
from inferc.manifest_types import Node as GraphNode
from inferc.manifest_types import Program
from inferc.passes.quantize.schemes import KV_INT8, SCHEMES, Budget, together
from inferc.runtime.artifact.load import Artifact
from inferc.runtime.record.tapped import TappedSequence
from inferc.runtime.runners.api import capabilities_of
from inferc.runtime.runners.nodes import Node, all_nodes
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.system.resources import available_memory_bytes

log = logging.getLogger(__name__)

MEMORY_SHARE = 0.8  # the share of free memory that the float32 model may take
# A layer counts as differing (`parts`) if the engine's relative distance from float32 is more than PARTS times that of
# the model in its own dtype, and more than PARTS_FLOOR.
PARTS = 2.0
PARTS_FLOOR = 1e-4
Report = Callable[[str], None]


@dataclass(frozen=True)
class Found:
    """The engine's answer, its logits, and the values of its layers, [rows, hidden_size] at positions."""

    prompt_len: int
    ids: list[int]  # the tokens of the prompt, then of the answer
    sampled: Tensor  # the positions after which a token was sampled
    logits: Tensor  # the logits at the sampled positions, [samples, vocab_size]
    layers: dict[int, tuple[Tensor, Tensor]]  # by layer: positions and values


@dataclass(frozen=True)
class Reference:
    """The logits and layer values that a model computes for the same tokens, at every position."""

    logits: Tensor
    layers: list[Tensor]


# The comparison and its parts: the order of their fields is that of the keys in the JSON of `inferc diff`.


class TokenComparison(Struct, frozen=True):
    """The engine's new tokens and the model's own greedy ones, which are None for a request that is sampled."""

    engine: list[int]
    reference: list[int] | None
    first_difference: int | None  # an index of both


class LogitsError(Struct, frozen=True):
    """The errors of the logits of the answer's tokens against a reference's; one is None if it is not finite."""

    of: str  # "engine" or a dtype, whose logits are measured
    to: str  # the dtype of the model that they are measured against
    max_abs_error: float | None
    relative_error: float | None
    chosen_max_abs_error: float | None  # the largest error of the log probability of a token of the answer
    kl: float | None  # the mean over positions
    top1_agreement: float
    first_top1_difference: int | None  # an index of the answer's tokens


class Distance(Struct, frozen=True):
    """The distance of values from a reference's; a figure is None if it is not finite."""

    max_abs_error: float | None
    relative_error: float | None


class LayerError(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The distances of a layer's output; those from float32 are None where no run in float32 judges the dtype."""

    layer: int
    values: list[str]  # the names of the nodes whose sum is the output
    rows: int
    engine_to_model: Distance
    engine_to_float32: Distance | None = None
    model_to_float32: Distance | None = None
    parts: bool  # whether the layer counts as differing (see PARTS)


class Comparison(Struct, frozen=True):
    """The comparison of a request's numbers on the engine and on the model.

    ok: whether the engine is within the artifact's budget, or None where nothing can judge; `reason` says why not.
    """

    ok: bool | None
    reason: str
    dtype: str
    prompt_tokens: int
    tokens: TokenComparison
    logits: list[LogitsError]
    layers: list[LayerError]
    parts_at: int | None  # the first layer that differs

    def to_json(self) -> dict[str, Any]:
        return dict(msgspec.to_builtins(self))


def diff(
    artifact: Artifact,
    model: str,
    prompt: list[int],
    params: SamplingParams,
    options: Mapping[str, Any],
    report: Report,
) -> Comparison:
    """Compare a request's numbers on the engine and on the model.

    options: fields of EngineConfig. Raises ConfigError for a model that is not the artifact's, and whatever taps and
    models raise.
    """
    target = artifact.manifest.targets[0]
    if len(artifact.ranks) == 1 and "taps" not in capabilities_of(artifact):
        raise UnsupportedError(
            f"{artifact.path} is for {target}, whose values are not seen; inferc verify compares its logits"
        )
    checkpoint = load(model)
    check_same(artifact, checkpoint)
    outputs = layer_outputs(artifact.program, artifact.model.hidden_size)
    report("run the engine")
    found = _run_engine(artifact, prompt, params, outputs, options)
    report("run the model")
    dtype = artifact.config.dtype
    hugging = reference_model(checkpoint, dtype, artifact.max_model_len)
    own = Reference(*reference_states(hugging, found.ids[:-1]))
    count = len(found.ids) - found.prompt_len
    greedy = reference_greedy(hugging, prompt, count) if _is_greedy(params) else None
    del hugging
    wide = own if dtype == "float32" else _judge(artifact, checkpoint, found.ids, report)
    ok, reason = _verdict(artifact, found, own, wide)
    layers = list(_layer_errors(found, own, wide, outputs))
    names = {"engine": found.logits, dtype: own.logits[found.sampled]}
    errors = [_logits_error(found, "engine", names["engine"], dtype, names[dtype])]
    if wide is not None and wide is not own:
        judge = wide.logits[found.sampled]
        errors += [_logits_error(found, name, logits, "float32", judge) for name, logits in names.items()]
    return Comparison(
        ok=ok,
        reason=reason,
        dtype=dtype,
        prompt_tokens=found.prompt_len,
        tokens=_compare_tokens(found.ids[found.prompt_len :], greedy),
        logits=errors,
        layers=layers,
        parts_at=next((each.layer for each in layers if each.parts), None),
    )


def check_same(artifact: Artifact, checkpoint: Checkpoint) -> None:
    """Raise ConfigError unless the checkpoint's config agrees with the model that the artifact was compiled from."""
    config, facts = checkpoint.config, artifact.model
    for name in ("model_type", "vocab_size", "hidden_size"):
        found = getattr(config, name, None)
        expected = getattr(facts, name)
        if found is not None and found != expected:
            raise ConfigError(
                f"{checkpoint.name} is not the model of {artifact.path}: found {name} {found}, expected {expected};"
                " give the one that the artifact was compiled from with --reference"
            )


def _is_greedy(params: SamplingParams) -> bool:
    """Return whether the request asks for the model's own most likely tokens."""
    plain = SamplingParams()
    names = (
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "allowed_token_ids",
        "banned_token_ids",
        "bad_words",
        "bad_words_ids",
        "no_repeat_ngram_size",
        "dry_multiplier",
        "min_tokens",
    )
    return params.greedy and all(getattr(params, name) == getattr(plain, name) for name in names)


# ------------------------------------------------------------------------------------------------ engine


def layer_outputs(program: Program, hidden_size: int) -> dict[int, tuple[Node, ...]]:
    """Return, for each layer, the values whose sum is the input of the next layer.

    There is one value, or two that the next layer's norm adds. A layer with any other output is left out.
    """
    nodes, entries = all_nodes(program), program.program.nodes
    readers: dict[str, list[GraphNode]] = defaultdict(list)
    for entry in entries:
        for source in _sources(entry.args):
            readers[source].append(entry)
    ends: dict[int, list[tuple[Node, set[str]]]] = defaultdict(list)
    for entry in entries:
        node = nodes.get(str(entry.name))
        if node is None or node.layer is None or node.shape != (hidden_size,) or entry.target == "aten.index_select":
            continue
        others = {each.id for each in readers[entry.id] if each.op != "output" and each.layer != node.layer}
        if others:
            ends[node.layer].append((node, others))
    found = {}
    for layer, each in sorted(ends.items()):
        if len(each) == 1 or (len(each) == 2 and each[0][1] & each[1][1]):
            found[layer] = tuple(node for node, _ in each)
    return found


def _sources(value: Any) -> Iterator[str]:
    """Yield the ids of the nodes that an argument holds, at any depth."""
    if isinstance(value, Mapping):
        if "node" in value:
            yield value["node"]
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _sources(each)


def _run_engine(
    artifact: Artifact,
    prompt: list[int],
    params: SamplingParams,
    outputs: Mapping[int, tuple[Node, ...]],
    options: Mapping[str, Any],
) -> Found:
    vocab_size = artifact.vocab_size
    logits = [
        node for node in all_nodes(artifact.program).values() if node.by_logits_row and node.shape == (vocab_size,)
    ]
    names = [node.name for nodes in outputs.values() for node in nodes]
    with inferc.LLM(artifact.path, **{"max_num_seqs": 1, **options, "tap": (*names, logits[-1].name)}) as llm:
        (answer,) = llm.generate([prompt], replace(params, n=1, tap=True))
        (tapped,) = llm.tapped()
    ids = [*prompt, *answer.outputs[0].token_ids]
    if len(ids) == len(prompt):
        raise RequestError("the engine's answer has no token: there is nothing to compare")
    new = len(ids) - len(prompt)  # the engine may have sampled more: a stop string cuts the answer afterwards
    return Found(
        len(prompt),
        ids,
        torch.from_numpy(tapped.sampled[:new].copy()),
        torch.from_numpy(tapped.values[logits[-1].name][:new].copy()),
        {layer: _values(tapped, nodes, len(ids) - 1) for layer, nodes in outputs.items()},
    )


def _values(tapped: TappedSequence, nodes: tuple[Node, ...], end: int) -> tuple[Tensor, Tensor]:
    """Return the positions before `end` and the sum of the values there, of nodes with equal rows."""
    rows = tapped.sampled if nodes[0].by_logits_row else torch.arange(len(tapped.token_ids)).numpy()
    count = int((rows < end).sum())
    whole = torch.stack([torch.from_numpy(tapped.values[node.name][:count].copy()).float() for node in nodes]).sum(0)
    return torch.from_numpy(rows[:count].copy()), whole


# ------------------------------------------------------------------------------------------------- judge


def _judge(artifact: Artifact, checkpoint: Checkpoint, ids: list[int], report: Report) -> Reference | None:
    """Run the model in float32, if it fits in memory."""
    needed, free = 4 * artifact.model.num_parameters, available_memory_bytes()
    if needed > MEMORY_SHARE * free:
        log.warning("no judge: the float32 model takes %.1f GB, and %.1f GB are free", needed / 1e9, free / 1e9)
        return None
    report("run the model in float32")
    return Reference(*reference_states(reference_model(checkpoint, "float32", artifact.max_model_len), ids[:-1]))


def _verdict(artifact: Artifact, found: Found, own: Reference, wide: Reference | None) -> tuple[bool | None, str]:
    """Return whether the engine's logits are within the artifact's budget, and why not.

    The verdict is None where nothing can judge.
    """
    judge = own if wide is None else wide
    ours = drift.measure([found.logits], [judge.logits[found.sampled]])
    budget = _budget(artifact)
    if not ours.is_finite:
        return False, "its logits are not all finite numbers"
    if budget is not None:
        count = len(ours.kl)
        missed = round(count * (1.0 - ours.top1_agreement))
        # With few positions the allowed share is rounded up: one miss in six does not show a rate above a tenth.
        is_few = missed <= math.ceil(count * (1.0 - budget.min_top1))
        reason = drift.judge_budget(float(ours.kl.mean()), 1.0 if is_few else ours.top1_agreement, budget).reason
    elif wide is None:
        return None, "no float32 model fits in memory, which is what would judge this dtype"
    elif wide is own:
        reason = drift.judge_float32(ours.relative_error).reason
    else:
        of_model = drift.measure([own.logits[found.sampled]], [judge.logits[found.sampled]])
        has_router = any(each.target == "inferc.moe_experts" for each in artifact.program.program.nodes)
        name = f"transformers' own in {artifact.config.dtype}"
        reason = drift.judge_by_own(ours.kl, of_model.kl, name, has_router).reason
    return not reason, reason


def _budget(artifact: Artifact) -> Budget | None:
    """Return the joint budget of the artifact's lossy passes; None if there were none."""
    lossy = [KV_INT8] if any(group.dtype == "int8" for group in artifact.kv_groups) else []
    done = artifact.model.quantization
    lossy += [SCHEMES[done.scheme].budget] if done and done.products else []
    return together(lossy) if lossy else None


# ------------------------------------------------------------------------------------------------ errors


def _compare_tokens(engine: list[int], greedy: list[int] | None) -> TokenComparison:
    first = None
    if greedy is not None:
        first = next((at for at, pair in enumerate(zip(engine, greedy, strict=True)) if pair[0] != pair[1]), None)
    return TokenComparison(engine, greedy, first)


def _logits_error(found: Found, name: str, logits: Tensor, to: str, reference: Tensor) -> LogitsError:
    """Return how far the logits of the answer's tokens are from a reference's."""
    found_drift = drift.measure([logits], [reference])
    answer = torch.tensor(found.ids[found.prompt_len :])[:, None]
    ours, theirs = (each.double().log_softmax(-1).gather(1, answer) for each in (logits, reference))
    differs = (logits.argmax(-1) != reference.argmax(-1)).nonzero().flatten().tolist()
    return LogitsError(
        of=name,
        to=to,
        max_abs_error=drift.figure(found_drift.max_abs_error),
        relative_error=drift.figure(found_drift.relative_error),
        chosen_max_abs_error=drift.figure(float((ours - theirs).abs().max())),
        kl=drift.figure(float(found_drift.kl.mean())),
        top1_agreement=round(found_drift.top1_agreement, 4),
        first_top1_difference=differs[0] if differs else None,
    )


def _layer_errors(
    found: Found, own: Reference, wide: Reference | None, outputs: Mapping[int, tuple[Node, ...]]
) -> Iterator[LayerError]:
    for layer, (positions, values) in found.layers.items():
        theirs = own.layers[layer][positions]
        to_own = _distance(values, theirs)
        ours_to_judge = theirs_to_judge = None
        off: float | None = to_own.relative_error
        limit: float | None = PARTS_FLOOR
        if wide is not None and wide is not own:
            judge = wide.layers[layer][positions]
            ours_to_judge, theirs_to_judge = _distance(values, judge), _distance(theirs, judge)
            off, limit = ours_to_judge.relative_error, theirs_to_judge.relative_error
        yield LayerError(
            layer=layer,
            values=[node.name for node in outputs[layer]],
            rows=len(positions),
            engine_to_model=to_own,
            engine_to_float32=ours_to_judge,
            model_to_float32=theirs_to_judge,
            parts=off is None or limit is None or off > max(PARTS_FLOOR, PARTS * limit),
        )


def _distance(values: Tensor, reference: Tensor) -> Distance:
    error = values.double() - reference.double()
    relative = float(error.norm()) / max(float(reference.double().norm()), 1e-30)
    return Distance(drift.figure(float(error.abs().max())), drift.figure(relative))
