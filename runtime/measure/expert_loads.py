"""The count of the tokens that each expert receives while an artifact runs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferc.cost.expert_loads import ExpertLoads
from inferc.errors import UnsupportedError
from inferc.manifest_types import Observable, TensorType
from inferc.runtime.artifact.load import Artifact
from inferc.runtime.engine.engine import Engine
from inferc.runtime.runners.api import ObservingRunner, capabilities_of


def record_loads(artifact: Artifact, engine: Engine) -> ExpertLoads:
    """Return a profile to which every step of `engine`, which runs `artifact`, adds its routed tokens.

    Raises UnsupportedError for an artifact without experts, of several ranks, or without compiled code.
    """
    num_experts = routed_values(artifact)
    if not num_experts:
        raise UnsupportedError(f"{artifact.path} has no experts whose loads could be recorded")
    if "observe" not in capabilities_of(artifact):
        raise UnsupportedError(
            f"{artifact.path}: loads are recorded on an artifact of one rank for the cpu target; compile one without"
            " --tp, --pp and --ep"
        )
    loads = ExpertLoads()

    def observe(entry: Observable, layer: int, ids: NDArray[Any]) -> None:
        if entry.name in num_experts:
            loads.add(layer, np.bincount(ids.ravel(), minlength=num_experts[entry.name]).tolist())

    assert isinstance(engine.runner, ObservingRunner), "it has the capability observe"
    engine.runner.set_observer(observe)
    return loads


def routed_values(artifact: Artifact) -> dict[str, int]:
    """Return the names of the values that hold chosen experts, with the number of experts they are chosen from."""
    nodes = {node.id: node for node in artifact.program.program.nodes}
    found = {}
    for node in nodes.values():
        source = node.args[0] if node.args else None
        routing = nodes[source["node"]] if isinstance(source, dict) and "node" in source else None
        is_ids = node.target == "getitem" and node.args[1] == 0
        if is_ids and routing is not None and routing.target == "inferc.moe_routing":
            router_logits = nodes[routing.args[0]["node"]].val
            assert isinstance(router_logits, TensorType), router_logits
            found[str(node.name)] = int(router_logits.shape[1])
    return found
