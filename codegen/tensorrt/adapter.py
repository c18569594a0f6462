"""The adapter to TensorRT and TensorRT-RTX, one API in two packages: their differences, and their errors as inferc's.

`tensorrt_rtx` builds for chips that need not be in this machine, and finishes the compilation where the plan runs.
`tensorrt` builds only for the chip in this machine. This module imports neither torch nor numpy, because the code that
runs an artifact imports it too.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from inferc.errors import ArtifactError, ConfigError, InfercError, UnsupportedError

log = logging.getLogger(__name__)

RTX, FULL = "tensorrt_rtx", "tensorrt"
TITLES = {RTX: "TensorRT-RTX", FULL: "TensorRT"}
INSTALL = {
    RTX: "pip install 'inferc[tensorrt]' (with a driver for CUDA 12: tensorrt-rtx-cu12)",
    FULL: "pip install tensorrt-cu13 or tensorrt-cu12",
}
# Every build on a machine without a GPU reports these errors of the CUDA runtime (35: no driver), and then goes on.
WITHOUT_DRIVER = re.compile(r"cudaError (35|100)\b|CUDA initialization failure")
LONGEST_MESSAGE = 400

# The shapes of a profile: an input's name to its least, usual and largest shape.
Shapes = Mapping[str, tuple[Sequence[int], Sequence[int], Sequence[int]]]


@dataclass
class Messages:
    """The messages of the library's logger; `Library.checked` raises its errors as inferc's own."""

    errors: list[str] = field(default_factory=list)
    num_told: int = 0

    def add(self, severity: str, text: str) -> None:
        if severity in ("ERROR", "INTERNAL_ERROR") and not WITHOUT_DRIVER.search(text):
            self.errors.append(text)
        elif severity == "VERBOSE":
            log.debug("%s", text)
        else:
            log.info("%s", text)

    def take(self) -> str:
        """Return the first error since the last call as one line, or "" if there is none.

        The other errors are logged.
        """
        new, self.num_told = self.errors[self.num_told :], len(self.errors)
        for text in new[1:]:
            log.info("%s", text)
        return shortened(new[0]) if new else ""


class Library:
    """One of the two TensorRT packages.

    module: the imported package, or a test's substitute for it.
    """

    def __init__(self, package: str, module: Any) -> None:
        self.package, self.module = package, module
        self.version = str(module.__version__)
        self.messages = Messages()
        self.logger = _make_logger(module, self.messages)

    @property
    def title(self) -> str:
        return f"{TITLES[self.package]} {self.version}"

    def archs(self) -> tuple[str, ...]:
        """Return the chips that it builds for without having one: `sm_86`, …; none for `tensorrt`."""
        if self.package != RTX:
            return ()
        named = [name for name in dir(self.module.ComputeCapability) if re.fullmatch(r"SM\d+", name)]
        return tuple(f"sm_{number}" for number in sorted(int(name[2:]) for name in named))

    @contextmanager
    def checked(self, doing: str, kind: type[InfercError] = UnsupportedError) -> Iterator[Checked]:
        """Raise what the library reports within the block as one error of `kind` that begins with `doing`."""
        checked = Checked(self, doing, kind)
        try:
            yield checked
        except (RuntimeError, TypeError, ValueError) as error:  # the exceptions that the library's bindings raise
            raise kind(f"{doing}: {self.messages.take() or shortened(str(error))} ({self.title})") from None
        if said := self.messages.take():
            raise kind(f"{doing}: {said} ({self.title})")


@dataclass(frozen=True)
class Checked:
    library: Library
    doing: str
    kind: type[InfercError]

    def made(self, result: Any) -> Any:
        """Return `result`, or raise if it is None or False, which the library returns when it could not make it."""
        if result is None or result is False:
            said = self.library.messages.take() or "it says nothing of why"
            raise self.kind(f"{self.doing}: {said} ({self.library.title})")
        return result


def _make_logger(module: Any, messages: Messages) -> Any:
    class Logger(module.ILogger):  # type: ignore[misc]  # the base class depends on the package
        def __init__(self) -> None:
            module.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            messages.add(str(getattr(severity, "name", severity)), text)

    return Logger()


def shortened(text: str) -> str:
    """Return one line of at most LONGEST_MESSAGE characters, without the position in the library's source."""
    line = " ".join(text.split())
    line = re.sub(r"\s*In \w+ at /_src/\S+?:\d+\)?", "", line)
    return line if len(line) <= LONGEST_MESSAGE else line[:LONGEST_MESSAGE] + "…"


# --------------------------------------------------------------------------------------- which package


def find(package: str) -> Library | None:
    """Return the package if it is installed; raise ConfigError if it is installed but does not load."""
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return Library(package, importlib.import_module(package))
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"{package} is installed and does not load ({shortened(str(error))}): its libraries are missing or for"
            f" another machine; {INSTALL[package]}"
        ) from None


def to_build(arch: str, arch_here: str | None, device: str = "tensorrt") -> Library:
    """Return the package that builds for `arch`; of two, TensorRT-RTX for the chips that it knows.

    arch_here: the chip of the GPU in this machine, if there is one; device: the target's device.
    Raises ConfigError if none is installed, and UnsupportedError if none builds for `arch`.
    """
    if none_is_installed():
        raise ConfigError(f"target {device}:{arch} needs TensorRT, which is not installed: {INSTALL[RTX]}")
    rtx = find(RTX)
    if rtx is not None and arch in rtx.archs():
        return rtx
    full = find(FULL)
    if full is not None and arch_here == arch:
        return full
    told = []
    if rtx is not None:
        told.append(f"{rtx.title} builds for {', '.join(rtx.archs())}")
    if full is not None:
        here = f"the GPU in this machine, {arch_here}" if arch_here else "the GPU in the machine, and here is none"
        told.append(f"{full.title} builds for {here}")
    raise UnsupportedError(f"target {device}:{arch}: {'; '.join(told)}; take one of those, or --target cuda:{arch}")


def none_is_installed() -> bool:
    """Tell whether neither package is installed."""
    return all(importlib.util.find_spec(package) is None for package in (RTX, FULL))


def to_run(package: str, version: str, where: str) -> Library:
    """Return the package that built a plan; raise ConfigError without it, ArtifactError for another version."""
    library = find(package)
    if library is None:
        raise ConfigError(
            f"{where} was built by {TITLES[package]} {version}, which is not installed: {INSTALL[package]};"
            " in that version"
        )
    if library.version != version:
        raise ArtifactError(
            f"{where} was built by {TITLES[package]} {version}, and a plan runs with the version that built it; found"
            f" {library.version}: install {version}, or compile the model again"
        )
    return library


# ------------------------------------------------------------------------------------------- building


@dataclass
class Building:
    """A TensorRT network under construction, for one chip."""

    library: Library
    arch: str
    builder: Any
    network: Any

    @staticmethod
    def begin(library: Library, arch: str) -> Building:
        trt = library.module
        with library.checked(f"cannot build for {arch}") as checked:
            builder = checked.made(trt.Builder(library.logger))
            flags = 0
            if hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED"):  # from TensorRT 11 on all networks are
                flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
            network = checked.made(builder.create_network(flags))
        return Building(library, arch, builder, network)

    def plan(self, profiles: Sequence[Shapes], *, tf32: bool) -> Any:
        """Build the serialized engine, and return it as a buffer.

        tf32: whether products of float32 may round their inputs to a mantissa of 10 bits. Raises UnsupportedError, in
        one line, for what the library does not build.
        """
        trt = self.library.module
        with self.library.checked(f"cannot build a plan for {self.arch}") as checked:
            config = checked.made(self.builder.create_builder_config())
            if self.library.package == RTX:
                config.num_compute_capabilities = 1
                capability = getattr(trt.ComputeCapability, f"SM{self.arch.removeprefix('sm_')}")
                checked.made(config.set_compute_capability(capability, 0))
            config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
            if not tf32:
                config.clear_flag(trt.BuilderFlag.TF32)
            for shapes in profiles:
                profile = checked.made(self.builder.create_optimization_profile())
                for name, (least, usual, most) in shapes.items():
                    profile.set_shape(name, tuple(least), tuple(usual), tuple(most))
                if config.add_optimization_profile(profile) < 0:
                    checked.made(None)
            return checked.made(self.builder.build_serialized_network(self.network, config))

    def layers(self) -> list[dict[str, Any]]:
        """Return the network's layers as given to the builder: name, kind, and each result's type and shape."""
        rows = []
        for index in range(self.network.num_layers):
            layer = self.network.get_layer(index)
            outputs = [layer.get_output(place) for place in range(layer.num_outputs)]
            results = [f"{each.dtype.name.lower()}{list(each.shape)}" for each in outputs if each is not None]
            rows.append({"name": layer.name, "kind": layer.type.name.lower(), "results": results})
        return rows
