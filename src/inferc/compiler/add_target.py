"""The command `inferc compile MODEL -o OUT --add-target`, which adds code for another chip to an existing artifact.

The weights stay as they are. The artifact's own program is compiled again for the new chip; the model is read only to
check that it is the same one.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import msgspec

from inferc.backends.backend import ExtendableBackend
from inferc.codegen.artifact_writer import ArtifactWriter
from inferc.codegen.folder import OutputFolder
from inferc.compiler.build import CompileSummary, hf_facts
from inferc.config import CompileConfig, ResolvedCompileConfig, from_dict
from inferc.errors import ArtifactError, ConfigError
from inferc.frontend.checkpoint.load import load
from inferc.manifest import PTX, SIGNATURE
from inferc.manifest_types import Config, KernelRow, ManifestFacts
from inferc.runtime.artifact.load import Artifact, load_artifact
from inferc.system.progress import Progress, silent
from inferc.targets import Target, find_spec

log = logging.getLogger(__name__)


def add_target(
    model: str | Path, out: str | Path, config: CompileConfig, *, progress: Progress | None = None
) -> CompileSummary:
    """Add the chips of `config.target` to the artifact at `out`, in one move.

    Its weight files are shared, not copied. Raises ConfigError for another model or other settings than it was compiled
    with, and for a chip that it already has.
    """
    start, report = time.perf_counter(), progress or silent
    artifact = load_artifact(out, to_run=False)
    added = _added(artifact, Target.parse(config.target))
    _check_same(artifact, model, config)
    with OutputFolder(Path(out)) as folder:
        writer = ArtifactWriter(folder)
        rows = _write(artifact, added, writer, report)
        for name, entry in artifact.manifest.files.items():
            if name not in writer.files:
                _link(artifact.path / name, folder.path / name)
                writer.files[name] = entry
        before = artifact.manifest
        cubins = {**artifact.entry.cubins, **{arch: f"kernels/{arch}" for arch in added.archs}}
        target = Target(added.spec, tuple(arch for arch in cubins if arch != PTX))
        manifest = msgspec.structs.replace(
            msgspec.convert(before, ManifestFacts, from_attributes=True),
            targets=[*before.targets, *added.each],
            programs=[msgspec.structs.replace(artifact.entry, cubins=cubins)],
            kernels=[*before.kernels, *rows],
            config=msgspec.structs.replace(before.config, target=str(target)),
        )
        writer.write_manifest(manifest)
        was_signed = (artifact.path / SIGNATURE).exists()
        folder.commit()
    if was_signed:
        log.warning(
            "%s was signed, and what was added is not: its signature is gone; sign it again: inferc sign %s --key KEY",
            out,
            out,
        )
    return CompileSummary(
        path=folder.out,
        seconds=round(time.perf_counter() - start, 3),
        weights_bytes=sum(entry.bytes for name, entry in writer.files.items() if entry.holds_weights(name)),
        artifact_bytes=sum(entry.bytes for entry in writer.files.values()),
        config=_resolved(manifest.config),
        passes=[],
        kernels=manifest.kernels,
        certificate=None,
    )


def _added(artifact: Artifact, wanted: Target) -> Target:
    """Return the chips to compile for; raise ConfigError where they cannot be added to the artifact."""
    have = artifact.manifest.targets
    specs = {find_spec(target) for target in have}
    if specs != {wanted.spec} or not wanted.spec.more_targets:
        has_plans = any(spec.archs == "one" for spec in specs)
        why = "whose plans are for one chip" if has_plans else f"whose weights do not lie as {wanted} reads them"
        raise ConfigError(
            f"{artifact.path} is compiled for {', '.join(have)}, {why};"
            " --add-target adds chips to an artifact for cuda: compile the model into another folder"
        )
    there = [target for target in wanted.each if target in have]
    if there:
        raise ConfigError(f"{artifact.path} has {', '.join(there)} already; it has: {', '.join(have)}")
    return wanted


def _check_same(artifact: Artifact, model: str | Path, config: CompileConfig) -> None:
    """Raise ConfigError unless the model and the settings are those that the artifact was compiled with."""
    facts, kept = hf_facts(load(model)), artifact.model.hf_config
    if differ := sorted(name for name in {*facts, *kept} if facts.get(name) != kept.get(name)):
        raise ConfigError(
            f"{model} is not the model of {artifact.path}: their configs differ in {', '.join(differ[:3])};"
            " give the model that it was compiled from"
        )
    defaults = CompileConfig()
    for name in ("dtype", "quantize", "kv_dtype", "max_model_len", "block_size"):
        value, compiled = getattr(config, name), getattr(artifact.config, name)
        if value not in (getattr(defaults, name), compiled):
            raise ConfigError(
                f"{artifact.path} was compiled with {name} {compiled}, not {value};"
                f" leave --{name.replace('_', '-')} out"
            )


def _write(artifact: Artifact, added: Target, writer: ArtifactWriter, report: Progress) -> list[KernelRow]:
    """Compile the artifact's program for the new chips; return their rows of the kernel table."""
    from inferc.runtime.runners.reference import graph_of

    backend: ExtendableBackend = added.spec.find_backend()(added)
    written = backend.add(graph_of(artifact), artifact.program, writer, report)
    if written is None:
        raise ArtifactError(
            f"{artifact.path} is by {artifact.manifest.producer}, whose kernels are not this inferc's; compile it again"
        )
    return written.kernels


def _link(source: Path, target: Path) -> None:
    """Link a file under another name, or copy it where the file system has no hard links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        import shutil

        try:
            shutil.copyfile(source, target)
        except OSError as error:
            raise ConfigError(f"cannot write {target.name}: {error.strerror}") from None


def _resolved(config: Config) -> ResolvedCompileConfig:
    return from_dict(ResolvedCompileConfig, {**msgspec.structs.asdict(config), "passes": tuple(config.passes)})
