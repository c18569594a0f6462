"""The opening of an artifact's TensorRT plans, and the checks before it."""

from __future__ import annotations

from typing import Any

from inferc.codegen.tensorrt.adapter import Library, to_run
from inferc.errors import ArtifactError, UnsupportedError
from inferc.manifest import MANIFEST
from inferc.manifest_types import Tensorrt
from inferc.runtime.artifact.load import Artifact
from inferc.runtime.runners.cuda.driver import Driver


def facts_of(artifact: Artifact) -> Tensorrt:
    """Return what the manifest states about the artifact's plans. Raises ArtifactError if it states nothing."""
    if artifact.manifest.tensorrt is None:
        raise ArtifactError(f"{artifact.path / MANIFEST} has no tensorrt, and its target has plans; compile it again")
    return artifact.manifest.tensorrt


def library_for(facts: Tensorrt, where: str, driver: Driver, device: str) -> Library:
    """Return the package that runs plans for which the manifest states `facts`.

    where: the plans' name, for people; device: the device part of the target. Raises ConfigError, UnsupportedError or
    ArtifactError if the plans are of another package, version or chip.
    """
    library = to_run(facts.package, facts.version, where)
    if driver.arch != facts.arch:
        raise UnsupportedError(
            f"{where} is for {facts.arch}, and this GPU ({driver.name}) is {driver.arch}: a plan runs on its own"
            f" chip alone; compile the model with --target {device}:{driver.arch} or cuda:{driver.arch}"
        )
    return library


def deserialize(library: Library, plan: Any, where: str) -> Any:
    """Return the engine of a plan, given as bytes. Raises ArtifactError if TensorRT refuses the plan."""
    trt = library.module
    with library.checked(f"{where} does not load", ArtifactError) as checked:
        runtime = checked.made(trt.Runtime(library.logger))
        if hasattr(runtime, "get_engine_validity"):
            _check_validity(trt, *runtime.get_engine_validity(plan))
        return checked.made(runtime.deserialize_cuda_engine(plan))


def _check_validity(trt: Any, validity: Any, diagnostics: int) -> None:
    """Raise ArtifactError with the diagnosis of TensorRT-RTX if it cannot run a plan here."""
    if validity == trt.EngineValidity.INVALID:
        found = [name for name, bit in trt.EngineInvalidityDiagnostics.__members__.items() if int(bit) & diagnostics]
        told = ", ".join(name.lower().replace("_", " ") for name in found) or "it says nothing of why"
        raise ArtifactError(f"TensorRT-RTX does not run this plan here: {told}")
