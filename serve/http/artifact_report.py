"""The report about an artifact for the web page: passes, certificate, memory and kernels, and its graphs as text."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from inferc.cost.formulas import CostLog, PassCost, Step
from inferc.errors import ArtifactError, InfercError, RequestError
from inferc.manifest import CERTIFICATE, COSTS
from inferc.runtime.artifact.load import Artifact
from inferc.serve.http.certificate_report import certificate_report
from inferc.serve.models.long_texts import Turns
from inferc.serve.models.served_model import ServedModel
from inferc.system.resources import available_cores

log = logging.getLogger(__name__)

GRAPH = re.compile(r"graph/(?:[^/]+/)?((\d+)_([^/]+))\.txt")
INPUT_LEN, CONTEXT = 1024, 4096  # prompt tokens of the reported prefill step, and context of the decode step
STATS_SECONDS = 1.0
READING = Turns("the reports about artifacts")


async def artifact_report(model: ServedModel) -> dict[str, Any]:
    """Return the report about an artifact, without the texts of its graphs.

    `kv_bytes` is null while no engine runs; `unreadable` names the files that cannot be read.
    """
    found = await READING.run(partial(of_artifact, model.artifact))
    return {
        "name": model.name,
        "fingerprint": model.fingerprint,
        "state": model.state,
        **found,
        "memory": await _memory(model),
    }


def graph_text(artifact: Artifact, name: str) -> bytes:
    """Return the graph after a pass as text, by a name that `artifact_report` lists. Raises RequestError."""
    graphs = _graphs(artifact)
    if name not in graphs:
        raise RequestError(f"graph {name!r:.80}: this artifact has {', '.join(graphs) or 'none'}")
    return artifact.read(graphs[name])


def _graphs(artifact: Artifact) -> dict[str, str]:
    """Return the names of the graphs, in the order of the passes, with their files; of several ranks, the first's."""
    matches = (GRAPH.fullmatch(name) for name in artifact.manifest.files)
    found: dict[str, str] = {}
    for match in sorted(filter(None, matches), key=lambda match: (int(match[2]), match[0])):
        found.setdefault(match[1], match[0])
    return found


def of_artifact(artifact: Artifact) -> dict[str, Any]:
    """Return the part of the report that comes from the artifact's files."""
    manifest, files = artifact.manifest_json(), artifact.manifest.files
    model, graphs = manifest["model"], list(_graphs(artifact))
    unreadable: list[str] = []
    certificate = _read_with(artifact, CERTIFICATE, certificate_report, unreadable)
    passes = _read_with(artifact, COSTS, lambda data: _passes(CostLog.load(data), graphs), unreadable)
    if passes is None:
        rows = [{**row, "decode": None, "prefill": None} for row in manifest["passes"]]
        passes = {"workload": None, "passes": _with_graphs(rows, graphs[1:])}
    facts = ("model_type", "architecture", "num_parameters", "num_attention_layers", "vocab_size", "hidden_size")
    return {
        "model": {name: model.get(name) for name in (*facts, "quantization")},
        "targets": manifest["targets"],
        "host": manifest["host"],
        "producer": manifest["producer"],
        "format_version": manifest["format_version"],
        "sha256": manifest["sha256"],
        "determinism": manifest.get("determinism"),
        "config": manifest["config"],
        **passes,
        "certificate": certificate,
        "kernels": manifest["kernels"],
        "files": {"number": len(files), "bytes": sum(entry.bytes for entry in files.values())},
        "unreadable": unreadable,
    }


def _read_with(
    artifact: Artifact, name: str, made: Callable[[bytes], dict[str, Any]], unreadable: list[str]
) -> dict[str, Any] | None:
    """Return the result of `made` for the bytes of a file of the artifact; None if there is none, or it is damaged.

    A damaged file is added to `unreadable`, and logged.
    """
    if name not in artifact.manifest.files:
        return None
    try:
        return made(artifact.read(name))
    except (ArtifactError, ValueError, LookupError, TypeError, AttributeError) as error:
        log.error("%s of %s cannot be read: %s: %s", name, artifact.path, type(error).__name__, error)
        unreadable.append(name)
        return None


def _passes(costs: CostLog, graphs: list[str]) -> dict[str, Any]:
    """Return the passes with their costs; `workload` says for which steps the costs are computed."""
    longest = costs.facts.max_model_len
    workload = {"input_len": min(INPUT_LEN, longest), "batch": 1, "context": min(CONTEXT, longest)}
    steps = {
        "decode": Step.decode(workload["batch"], workload["context"]),
        "prefill": Step.prefill(workload["input_len"]),
    }
    rows = [_row(row, steps) for row in (costs.captured, *costs.passes)]
    return {"workload": workload, "passes": _with_graphs(rows, graphs)}


def _with_graphs(rows: list[dict[str, Any]], graphs: list[str]) -> list[dict[str, Any]]:
    names = {name.partition("_")[2]: name for name in graphs}
    return [{**row, "graph": names.get(row["name"])} for row in rows]


def _row(row: PassCost, steps: dict[str, Step]) -> dict[str, Any]:
    header = {name: getattr(row, name) for name in ("name", "rewrites", "nodes_before", "nodes_after")}
    return {**header, **{name: _work(row, step) for name, step in steps.items()}}


def _work(row: PassCost, step: Step) -> dict[str, int]:
    """Return the work of a step: its kernels, the bytes that they read and write, and its floating-point operations.

    Each kernel counts its inputs and its results once.
    """

    def total(*formulas: str) -> int:
        return round(
            sum(count * sum(step.evaluate(getattr(op, name)) for name in formulas) for op, count in row.ops.items())
        )

    return {
        "kernels": sum(row.ops.values()),
        "bytes": total("weights", "cache", "activations"),
        "flops": total("flops"),
    }


async def _memory(model: ServedModel) -> dict[str, Any]:
    artifact, config = model.artifact, model.config
    seqs, tokens = config.max_num_seqs, config.token_budget(artifact.manifest.targets[0])
    threads = available_cores() if config.num_threads == "auto" else config.num_threads
    groups = artifact.whole_kv_groups
    found: dict[str, Any] = {
        "weights_bytes": sum(len(data) for data in artifact.maps.values()),
        "arena_bytes": sum(rank.memory.reserved_bytes(tokens, seqs, threads) for rank in artifact.ranks),
        "arena_for": {"num_tokens": tokens, "num_seqs": seqs, "num_threads": threads},
        "kv_bytes": None,
        "kv_tokens": None,
        "kv_bytes_per_token": sum(rank.kv_bytes_per_token for rank in artifact.ranks),
        "kv_groups": msgspec.to_builtins(groups),
        "block_size": artifact.block_size,
        "max_model_len": artifact.max_model_len,
    }
    try:
        async with asyncio.timeout(STATS_SECONDS):
            stats = await model.engine.stats()
    except (InfercError, TimeoutError):
        return found
    sizes = [count * stats.block_size for count in stats.num_blocks]
    if len(sizes) == len(groups):
        found["kv_bytes"] = sum(size * group.bytes_per_token for size, group in zip(sizes, groups, strict=True))
        found["kv_tokens"] = min(sizes, default=None)
    return found
