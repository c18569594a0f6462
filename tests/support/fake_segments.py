"""Artifacts of segments on a fake GPU: the plans' networks are built again where Triton cannot compile."""

from __future__ import annotations

import json
from pathlib import Path

from fake_tensorrt import Known, digest
from tensorrt_network import Evaluated

from inferc.codegen.segments import segments_of
from inferc.codegen.tensorrt.adapter import Building, to_build
from inferc.codegen.tensorrt.segments import PROFILES, build, first_of_each
from inferc.manifest import TENSORRT_LAYERS, segment_plan
from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.runners.reference import graph_of


def known_plans(folder: Path) -> dict[str, Known]:
    """Return by the digest of each plan the network that it was built from, as its layers tell."""
    artifact = load_artifact(folder)
    assert artifact.manifest.tensorrt is not None
    program = graph_of(artifact)
    layers = json.loads((folder / TENSORRT_LAYERS).read_bytes())
    arch = artifact.manifest.tensorrt.arch
    known = {}
    for segment in first_of_each(segments_of(program)):
        building = Building.begin(to_build(arch, None), arch)
        net = build(program, segment, building)
        assert building.layers() == layers[segment.engine], "another network than the plan's"
        network = Evaluated(net.network, {})
        shapes = [profile.shapes(segment) for profile in PROFILES]
        known[digest((folder / segment_plan(segment.engine)).read_bytes())] = Known(network, shapes)
    return known
