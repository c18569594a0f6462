"""What an artifact is compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from inferc.errors import ConfigError

DEVICES = ("cpu", "cuda", "reference")


@dataclass(frozen=True)
class Target:
    """What an artifact is compiled for: `cpu`, `reference`, or `cuda` with an architecture (`sm_90`)."""

    device: Literal["cpu", "cuda", "reference"]
    arch: str = ""

    @staticmethod
    def parse(spec: str) -> Target:
        """From the command line's form: `cpu`, `reference`, `cuda:sm_90`. Raises ConfigError."""
        device, _, arch = spec.partition(":")
        if device not in DEVICES:
            raise ConfigError(f"unknown target {spec!r}; expected one of {', '.join(DEVICES)} (cuda as cuda:sm_90)")
        if (device == "cuda") != arch.startswith("sm_"):
            raise ConfigError(f"target {spec!r}: write cpu, reference or cuda:sm_NN")
        return Target(device, arch)  # type: ignore[arg-type]

    @property
    def spec(self) -> str:
        return f"{self.device}:{self.arch}" if self.arch else self.device
