"""The facts about an artifact that `inferc inspect` shows: sizes, kernels, passes, the certificate."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import msgspec

from inferc.config import EngineConfig
from inferc.manifest import CERTIFICATE, TENSORRT_LAYERS, TENSORRT_PLAN, segment_plan
from inferc.runtime.artifact.load import Artifact, load_artifact
from inferc.signature import signature_facts
from inferc.system.resources import available_cores


def inspect_artifact(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what `inferc inspect --json` prints: sizes, kernels and their resources, the certificate.

    It reads no weights.
    """
    artifact = load_artifact(path, to_run=False)
    manifest, files = artifact.manifest_json(), artifact.manifest.files
    defaults = EngineConfig()
    num_threads = available_cores()
    seqs, tokens = defaults.max_num_seqs, defaults.token_budget(manifest["targets"][0])

    def arena_bytes(rank: Artifact) -> int:
        return rank.memory.reserved_bytes(tokens, seqs, num_threads)

    return {
        "format_version": manifest["format_version"],
        "signature": signature_facts(artifact.path, artifact.manifest_bytes),
        "producer": manifest["producer"],
        "targets": manifest["targets"],
        "weights_bytes": sum(entry.bytes for name, entry in files.items() if entry.holds_weights(name)),
        "arena_bytes": sum(map(arena_bytes, artifact.ranks)),
        "arena_for": {"num_tokens": tokens, "num_rows": tokens, "num_seqs": seqs, "num_threads": num_threads},
        "kv_bytes_per_token": sum(rank.kv_bytes_per_token for rank in artifact.ranks),
        "kv_groups": msgspec.to_builtins(artifact.whole_kv_groups),
        "libraries": artifact.entry.libraries,
        "cubins": artifact.entry.cubins,
        "programs": [
            {
                **{name: getattr(rank.entry, name) for name in ("name", "tp_rank", "pp_stage", "ep_rank")},
                "kv_groups": msgspec.to_builtins(rank.kv_groups),
                "libraries": rank.entry.libraries,
                "weights_bytes": rank.weights_bytes,
                "arena_bytes": arena_bytes(rank),
                "kv_bytes_per_token": rank.kv_bytes_per_token,
            }
            for rank in artifact.ranks
        ],
        "model": manifest["model"],
        "chat": _chat_facts(artifact),
        "config": manifest["config"],
        "passes": manifest["passes"],
        "kernels": manifest["kernels"],
        **({"tensorrt": _plan_facts(artifact, manifest["tensorrt"])} if "tensorrt" in manifest else {}),
        "certificate": artifact.read_json(CERTIFICATE) if CERTIFICATE in files else None,
    }


def _chat_facts(artifact: Artifact) -> dict[str, Any] | None:
    """Return the form in which the chat template reads messages (inferc.chat_form), or None without a template."""
    name = "tokenizer/golden_chat.json"
    golden = artifact.read_json(name) if name in artifact.manifest.files else {}
    return golden.get("form") if isinstance(golden, dict) else None


def _plan_facts(artifact: Artifact, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of TensorRT plans: their builder, their chip, their size, and their layers counted by kind."""
    layers = artifact.read_json(TENSORRT_LAYERS)
    if "plans" not in facts:
        return {**facts, **_of_plan(artifact, TENSORRT_PLAN, layers)}
    rows = [{**row, **_of_plan(artifact, segment_plan(row["name"]), layers[row["name"]])} for row in facts["plans"]]
    return {**facts, "plans": rows}


def _of_plan(artifact: Artifact, file: str, layers: list[dict[str, Any]]) -> dict[str, Any]:
    kinds = Counter(str(layer["kind"]) for layer in layers)
    return {"plan_bytes": len(artifact.maps[file]), "layers": dict(kinds.most_common())}
