"""The facts about an artifact that `inferc inspect` shows: sizes, kernels, passes, the certificate."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import msgspec
from msgspec import Struct

from inferc.config import EngineConfig
from inferc.manifest import CERTIFICATE, MANIFEST, MTP, TENSORRT_LAYERS, TENSORRT_PLAN, Head, segment_plan
from inferc.manifest_types import Config, KernelRow, KvGroup, Model, PassRow, PlanProfile, PlanRow, Tensorrt
from inferc.runtime.artifact.load import Artifact, load_artifact
from inferc.signature import SignatureFacts, signature_facts
from inferc.system.resources import available_cores

# The parts of engine.json that are shown as they are there, with fields that have no type and in the file's order.
AS_STORED = ("producer", "targets", "model", "config", "passes", "kernels")


class ArenaMaxima(Struct, frozen=True):
    """The most that a step may hold, for which the size of the arena is given."""

    num_tokens: int
    num_rows: int
    num_seqs: int
    num_threads: int


class RankFacts(Struct, frozen=True):
    """The facts about the program of one rank."""

    name: str
    tp_rank: int
    pp_stage: int
    ep_rank: int
    kv_groups: list[KvGroup]
    libraries: dict[str, str]
    weights_bytes: int
    arena_bytes: int
    kv_bytes_per_token: int


class PlanFacts(PlanRow, frozen=True):
    """The facts about the TensorRT plan of a segment of the step; `layers` counts its layers by kind."""

    plan_bytes: int
    layers: dict[str, int]


class TensorrtFacts(Struct, frozen=True, omit_defaults=True):
    """The facts about TensorRT plans: their builder, their chip, their profiles, their sizes.

    An artifact has either `plans`, one for each segment, or one plan of `plan_bytes` with `layers`, counted by kind.
    """

    package: str
    version: str
    arch: str
    profiles: list[PlanProfile]
    plans: list[PlanFacts] | None = None
    plan_bytes: int | None = None
    layers: dict[str, int] | None = None


class Inspection(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The facts about an artifact, in the order in which `inferc inspect --json` prints them.

    mtp: the facts about the MTP layer that is in the artifact, or None without one.
    adapters: the largest rank of LoRA adapters and the places of a step that they may add to, or None without room.
    chat: the form in which the chat template reads messages (inferc.chat.form), or None without a template. calls: the
    form in which the model writes calls of tools (inferc.chat.calls), reasoning: that of its reasoning
    (inferc.chat.reasoning), or None if there is none that is known. chat, calls, reasoning, certificate and stored
    (engine.json) are as parsed, with all their fields.
    """

    format_version: int
    signature: SignatureFacts | None
    producer: str
    targets: list[str]
    weights_bytes: int
    arena_bytes: int
    arena_for: ArenaMaxima
    kv_bytes_per_token: int
    kv_groups: list[KvGroup]
    libraries: dict[str, str]
    cubins: dict[str, str]
    programs: list[RankFacts]
    model: Model
    mtp: Head | None = None
    adapters: dict[str, int] | None = None
    chat: dict[str, Any] | None
    calls: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    config: Config
    passes: list[PassRow]
    kernels: list[KernelRow]
    tensorrt: TensorrtFacts | None = None
    certificate: dict[str, Any] | None
    stored: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        facts = msgspec.to_builtins(self)
        stored = facts.pop("stored")
        return {**facts, **{name: stored[name] for name in AS_STORED}}


def inspect_artifact(path: str | os.PathLike[str]) -> Inspection:
    """Return the facts about an artifact: sizes, kernels and their resources, the certificate.

    It reads no weights.
    """
    artifact = load_artifact(path, to_run=False)
    manifest = artifact.manifest
    defaults = EngineConfig()
    num_threads = available_cores()
    seqs, tokens = defaults.max_num_seqs, defaults.token_budget(manifest.targets[0])

    def arena_bytes(rank: Artifact) -> int:
        return rank.memory.reserved_bytes(tokens, seqs, num_threads)

    return Inspection(
        format_version=manifest.format_version,
        signature=signature_facts(artifact.path, artifact.manifest_bytes),
        producer=manifest.producer,
        targets=manifest.targets,
        weights_bytes=sum(entry.bytes for name, entry in manifest.files.items() if entry.holds_weights(name)),
        arena_bytes=sum(map(arena_bytes, artifact.ranks)),
        arena_for=ArenaMaxima(num_tokens=tokens, num_rows=tokens, num_seqs=seqs, num_threads=num_threads),
        kv_bytes_per_token=sum(rank.kv_bytes_per_token for rank in artifact.ranks),
        kv_groups=list(artifact.whole_kv_groups),
        libraries=artifact.entry.libraries,
        cubins=artifact.entry.cubins,
        programs=[_rank_facts(rank, arena_bytes(rank)) for rank in artifact.ranks],
        model=manifest.model,
        mtp=_mtp_facts(artifact),
        adapters=_room_for_adapters(artifact),
        chat=_chat_facts(artifact, "form"),
        calls=_chat_facts(artifact, "calls"),
        reasoning=_chat_facts(artifact, "reasoning"),
        config=manifest.config,
        passes=manifest.passes,
        kernels=manifest.kernels,
        tensorrt=None if manifest.tensorrt is None else _tensorrt_facts(artifact, manifest.tensorrt),
        certificate=artifact.read_json(CERTIFICATE) if CERTIFICATE in manifest.files else None,
        stored=artifact.manifest_json(),
    )


def _mtp_facts(artifact: Artifact) -> Head | None:
    name = f"{MTP}/{MANIFEST}"
    if name not in artifact.manifest.files:
        return None
    return msgspec.convert(artifact.read_json(name)["model"]["head"], Head)


def _room_for_adapters(artifact: Artifact) -> dict[str, int] | None:
    room = artifact.program.program.info.get("adapters")
    return None if room is None else {"rank": room["rank"], "places": len(room["sites"])}


def _rank_facts(rank: Artifact, arena_bytes: int) -> RankFacts:
    entry = rank.entry
    return RankFacts(
        name=entry.name,
        tp_rank=entry.tp_rank,
        pp_stage=entry.pp_stage,
        ep_rank=entry.ep_rank,
        kv_groups=entry.kv_groups,
        libraries=entry.libraries,
        weights_bytes=rank.weights_bytes,
        arena_bytes=arena_bytes,
        kv_bytes_per_token=rank.kv_bytes_per_token,
    )


def _chat_facts(artifact: Artifact, field: str) -> dict[str, Any] | None:
    name = "tokenizer/golden_chat.json"
    golden = artifact.read_json(name) if name in artifact.manifest.files else {}
    return golden.get(field) if isinstance(golden, dict) else None


def _tensorrt_facts(artifact: Artifact, stored: Tensorrt) -> TensorrtFacts:
    layers = artifact.read_json(TENSORRT_LAYERS)
    plans, num_bytes, kinds = None, None, None
    if stored.plans is None:
        num_bytes, kinds = _plan_size(artifact, TENSORRT_PLAN), _count_kinds(layers)
    else:
        plans = [
            PlanFacts(
                name=row.name,
                calls=row.calls,
                plan_bytes=_plan_size(artifact, segment_plan(row.name)),
                layers=_count_kinds(layers[row.name]),
            )
            for row in stored.plans
        ]
    return TensorrtFacts(
        package=stored.package,
        version=stored.version,
        arch=stored.arch,
        profiles=stored.profiles,
        plans=plans,
        plan_bytes=num_bytes,
        layers=kinds,
    )


def _plan_size(artifact: Artifact, file: str) -> int:
    return len(artifact.maps[file])


def _count_kinds(layers: list[dict[str, Any]]) -> dict[str, int]:
    """Return how many layers there are of each kind, the most frequent kind first."""
    return dict(Counter(str(layer["kind"]) for layer in layers).most_common())
