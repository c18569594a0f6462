"""The `inferc inspect` command, which shows what an artifact holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from inferc.cli.common import Json, Out, print_json, say

if TYPE_CHECKING:
    from inferc.manifest import Head
    from inferc.manifest_types import Config, KvGroup, Model
    from inferc.runtime.artifact.inspect import Inspection, RankFacts, TensorrtFacts
    from inferc.signature import SignatureFacts


def inspect(out: Out, as_json: Json = False) -> None:
    """Show what an artifact holds: targets, sizes, KV cache groups, chat format, signature, kernels, certificate."""
    from inferc.runtime.artifact.inspect import inspect_artifact

    facts = inspect_artifact(out)
    if as_json:
        print_json(facts.to_json())
    else:
        _show(facts)


def _show(facts: Inspection) -> None:
    import msgspec

    from inferc.chat.calls import call_form_of
    from inferc.chat.form import form_of
    from inferc.chat.reasoning import reasoning_form_of

    config, model = facts.config, facts.model
    rows = {
        "model": f"{model.model_type}, {config.dtype}, up to {config.max_model_len} tokens",
        **({"head": _head(model.head, model.vocab_size)} if model.head is not None else {}),
        **({"MTP": _mtp(facts.mtp)} if facts.mtp is not None else {}),
        "targets": ", ".join(facts.targets),
        "weights": f"{facts.weights_bytes / 1e6:.1f} MB{_quantized(model, config.dtype)}",
        "arena": f"{facts.arena_bytes / 1e6:.1f} MB",
        "KV cache": f"{facts.kv_bytes_per_token} bytes a token",
        **({"chat": str(form_of(facts.chat))} if facts.chat is not None else {}),
        **({"calls": str(call_form_of(facts.calls))} if facts.calls is not None else {}),
        **({"reasoning": str(reasoning_form_of(facts.reasoning))} if facts.reasoning is not None else {}),
        **({"adapters": _room(facts.adapters)} if facts.adapters is not None else {}),
        "format": f"version {facts.format_version}, by {facts.producer}",
        "signature": _signature(facts.signature),
        **({"passes": ", ".join(config.passes) + " (besides inferc's own)"} if config.passes else {}),
    }
    for name, value in rows.items():
        say(f"{name:10}{value}")
    has_ranks = len(facts.programs) > 1
    for rank in facts.programs if has_ranks else []:
        _say_rank(rank, config)
    for group in facts.kv_groups:
        _say_group(group, has_ranks)
    if facts.tensorrt is not None:
        _say_plan(facts.tensorrt)
    say("kernels")
    width = max((len(kernel.name) for kernel in facts.kernels), default=0)
    for kernel in facts.kernels:
        fields = msgspec.to_builtins(kernel).items()
        rest = "  ".join(f"{key}={value}" for key, value in fields if key not in ("name", "target"))
        say(f"  {kernel.name:{width}} {kernel.target:12} {rest}")


def _head(head: Head, vocab_size: int) -> str:
    """Return text that says what a head drafts, for which model, and from which of its rows."""
    drafted = "all tokens" if head.num_logits == vocab_size else f"{head.num_logits} of {vocab_size} tokens"
    of = f"a model of {head.num_layers} layers of {head.hidden_size}"
    return f"{head.kind}: it drafts {drafted} for {of}, from its {', '.join(head.inputs)}"


def _mtp(head: Head) -> str:
    return f"a layer that drafts from the model's {', '.join(head.inputs)}: run it with --speculate mtp"


def _say_rank(rank: RankFacts, config: Config) -> None:
    places = (("tp", rank.tp_rank, config.tp), ("pp", rank.pp_stage, config.pp), ("ep", rank.ep_rank, config.ep))
    where = "  ".join(f"{name} {index}" for name, index, count in places if count > 1)
    sizes = f"{rank.weights_bytes / 1e6:.1f} MB of weights, {rank.arena_bytes / 1e6:.1f} MB arena"
    say(f"  {where:14}{sizes}, {rank.kv_bytes_per_token} KV bytes a token")


def _say_group(group: KvGroup, has_ranks: bool) -> None:
    reach = f"{group.kind} {group.window}" if group.window else group.kind
    count = group.num_kv_heads
    each = " on each rank" if has_ranks else ""
    scaled = " with a float32 scale" if group.dtype == "int8" else ""
    heads = f"{count} head{'s' if count > 1 else ''} of {group.head_dim}{each}, {group.dtype}{scaled}"
    count = len(group.layers)
    layers = f"{count} layer{'s' if count > 1 else ''} ({_ranges(group.layers)})"
    say(f"  {reach:14}{layers}, {heads}, {group.bytes_per_token} bytes a token")


def _say_plan(facts: TensorrtFacts) -> None:
    """Print the plans, profiles and layers of an artifact for TensorRT."""
    by, plans = f"{facts.package} {facts.version} for {facts.arch}", facts.plans or []
    if plans:
        say(f"plans     {by}, {len(plans)} without weights, for {sum(each.calls for each in plans)} segments of a step")
    else:
        say(f"plan      {by}, {(facts.plan_bytes or 0) / 1e6:.1f} MB, weights included")
    for profile in facts.profiles:
        limits = {"seqs": profile.max_num_seqs, "tokens": profile.max_num_tokens, "rows": profile.max_num_rows}
        shown = ", ".join(f"{limit} {name}" for name, limit in limits.items() if limit is not None)
        say(f"  {profile.name:14}at most {shown} a call")
    for each in plans:
        calls = f"{each.calls} call{'s' if each.calls > 1 else ''}"
        say(f"  {each.name:14}{each.plan_bytes / 1e6:.2f} MB, {calls}: {_layers(each.layers)}")
    if facts.layers is not None:
        say(f"  {'layers':14}{_layers(facts.layers)}")


def _layers(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def _room(adapters: dict[str, int]) -> str:
    return f"room for LoRA adapters of rank {adapters['rank']} or less, at {adapters['places']} places"


def _quantized(model: Model, dtype: str) -> str:
    """Return text that says which parts of a model are quantized and which are not; empty if none is."""
    done = model.quantization
    if done is None:
        return ""
    kept = "".join(f", {what}" + (f" ({count})" if count > 1 else "") for what, count in done.kept.items())
    return f"; {done.scheme}: {done.products} products quantized; in {dtype}: norms{kept}"


def _signature(facts: SignatureFacts | None) -> str:
    """Return text that names the keys of the signature, which only --trusted-keys verifies."""
    if facts is None:
        return "none"
    stale = "" if facts.is_current else ", of what the artifact was before: sign it again"
    return f"by {', '.join(facts.keys)}{stale} (nothing is proven without --trusted-keys)"


def _ranges(numbers: list[int]) -> str:
    """Return ascending numbers as short text with ranges, for example "0-3, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
