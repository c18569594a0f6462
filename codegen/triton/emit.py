"""The Triton kernels of a program, compiled for the chips of `ARCHS`, as files and rows for its artifact."""

from __future__ import annotations

import inspect
import logging
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from inferc.codegen.kernels import KERNELS, Kernel
from inferc.codegen.target import Target
from inferc.codegen.triton.build import Cubin, available
from inferc.codegen.triton.launch import LaunchRecord
from inferc.manifest import json_bytes
from inferc.program import Program, target_name

log = logging.getLogger(__name__)

LAUNCH_RECORDS = "kernels/launch.json"  # by cubin: what a runner without Triton needs, see launch.py
ARCHS = ("sm_90", "sm_80")
WHY_NOT_RUN = "a cuda step is not built yet: the cubin is compiled and its launch record checked, nothing launches it"


@dataclass
class Cubins:
    """files: contents by name, for the artifact; kernels: rows of the manifest's kernel table."""

    files: dict[str, bytes] = field(default_factory=dict)
    kernels: list[dict[str, Any]] = field(default_factory=list)


def emit_cubins(program: Program) -> Cubins:
    """Compile every Triton kernel that a node of the lowered program could use; nothing where Triton is not installed."""
    out = Cubins()
    if not available():
        log.info("triton is not installed: the artifact gets no cuda kernels")
        return out
    counts: Counter[str] = Counter()
    records: dict[str, dict[str, Any]] = {}
    for node in program.graph.nodes:
        for kernel, target in _choices(node):
            emit = kernel.load_emit()
            cubin: Cubin = emit(node, target)
            file = f"kernels/{cubin.record.name}.{target.arch}.cubin"
            counts[file] += 1
            if file not in out.files:
                out.files[file] = cubin.data
                out.files[f"kernels/{kernel.name}.py"] = inspect.getsource(sys.modules[emit.__module__]).encode()
                out.kernels.append(_row(file, cubin.record))
                records[file] = cubin.record.to_json()
    if records:
        out.files[LAUNCH_RECORDS] = json_bytes(records)
    for row in out.kernels:
        row["nodes"] = counts[row["file"]]
    return out


def _choices(node: fx.Node) -> list[tuple[Kernel, Target]]:
    """The Triton kernels that could run `node`, for each chip."""
    op = target_name(node.target) if node.op == "call_function" else ""
    targets = [Target("cuda", arch) for arch in ARCHS]
    kernels = [kernel for kernel in KERNELS if kernel.backend == "triton" and kernel.op == op]
    return [(kernel, target) for kernel in kernels for target in targets if kernel.supports(node, target)]


def _row(file: str, record: LaunchRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "target": f"cuda:{record.arch}",
        "op": record.op,
        "runs": False,
        "reason": WHY_NOT_RUN,
        "file": file,
        **record.resources,
        "shared_bytes": record.shared_bytes,
        "num_warps": record.num_warps,
    }
