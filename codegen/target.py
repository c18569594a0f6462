"""What an artifact is compiled for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from inferc.codegen.triton.aot.launch import ARCHS
from inferc.config import has_dense_cache
from inferc.errors import ConfigError, UnsupportedError

DEVICES = ("cpu", "cuda", "onnx", "tensorrt", "tensorrt-paged", "reference")


@dataclass(frozen=True)
class Target:
    """What an artifact is compiled for: `cpu`, `onnx`, `reference`, `tensorrt` or `tensorrt-paged` with one architecture, or
    `cuda` with one or several. `onnx:standard` is ONNX without onnxruntime's own ops, `onnx:cuda` for onnxruntime on an NVIDIA GPU.
    """

    device: Literal["cpu", "cuda", "onnx", "tensorrt", "tensorrt-paged", "reference"]
    archs: tuple[str, ...] = ()

    @staticmethod
    def parse(spec: str) -> Target:
        """From the command line's form: `cpu`, `reference`, `cuda:sm_90`, `cuda:sm_90,sm_80`, `tensorrt:sm_86`. Raises ConfigError."""
        device, _, archs = spec.partition(":")
        if device not in DEVICES:
            raise ConfigError(f"unknown target {spec!r}; expected one of {', '.join(DEVICES)} (cuda as cuda:sm_90)")
        if device in ("tensorrt", "tensorrt-paged"):
            if not re.fullmatch(r"sm_\d{2,3}", archs):
                raise ConfigError(f"target {spec!r}: a plan is for one chip; write for example {device}:sm_86")
            if device == "tensorrt-paged" and archs not in ARCHS:
                raise UnsupportedError(f"target {spec!r}: no kernels for {archs}; known: {', '.join(ARCHS)}")
            return Target(device, (archs,))  # type: ignore[arg-type]  # which it can be, the installed TensorRT says
        if device == "onnx" and archs in ("standard", "cuda"):
            return Target("onnx", (archs,))
        if device != "cuda":
            if archs:
                forms = "onnx, onnx:standard or onnx:cuda" if device == "onnx" else device
                raise ConfigError(f"target {spec!r}: {device} takes no architecture; write {forms}")
            return Target(device)  # type: ignore[arg-type]
        named = tuple(arch for arch in archs.split(",") if arch)
        if not named:
            raise ConfigError(
                f"target {spec!r} names no chip; write for example cuda:sm_90 (known: {', '.join(ARCHS)})"
            )
        for arch in named:
            if arch not in ARCHS:
                raise UnsupportedError(f"target {spec!r}: no kernels for {arch}; known: {', '.join(ARCHS)}")
        if len(set(named)) < len(named):
            raise ConfigError(f"target {spec!r} names a chip twice")
        return Target("cuda", named)

    @property
    def spec(self) -> str:
        return f"{self.device}:{','.join(self.archs)}" if self.archs else self.device

    @property
    def is_standard(self) -> bool:
        """Whether the standard's ops alone are to be used."""
        return self.archs == ("standard",)

    @property
    def rounds_rows(self) -> bool:
        """Whether its kernels round rows that a quantized program has in floats."""
        return self.spec == "onnx"

    @property
    def has_fp8(self) -> bool:
        """Whether its chips multiply in fp8, as those from sm_89 on do."""
        return bool(self.archs) and all(int(arch.removeprefix("sm_")) >= 89 for arch in self.archs)

    @property
    def has_dense_cache(self) -> bool:
        """Whether its steps read a KV cache of whole sequences (`DenseKVCache`) and not of blocks."""
        return has_dense_cache(self.device)

    @property
    def has_segments(self) -> bool:
        """Whether TensorRT computes what lies between the kernels of its steps (`PartitionSegments`)."""
        return self.device == "tensorrt-paged"

    def of_node(self, *, in_segment: bool) -> Target:
        """For whom a node's kernel is chosen: of a target with segments TensorRT, or a GPU's kernels."""
        if not self.has_segments:
            return self
        return Target("tensorrt" if in_segment else "cuda", self.archs)

    @property
    def each(self) -> tuple[str, ...]:
        """One name a chip, as the manifest has them: `cuda:sm_90`, `cuda:sm_80`."""
        return tuple(f"{self.device}:{arch}" for arch in self.archs) or (self.device,)
