"""The numbers of tokens that each expert of each layer got, from which experts are placed on ranks.

`inferc eval` records such a profile, `inferc compile` reads it. Imports neither torch nor any compile stage.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from inferc.errors import ConfigError
from inferc.system.atomic_file import atomic_write
from inferc.system.json_text import parse_json


@dataclass
class ExpertLoads:
    """The number of tokens that each expert of each layer got."""

    layers: dict[int, list[int]] = field(default_factory=dict)

    def add(self, layer: int, counts: Sequence[int]) -> None:
        """Add the counts of tokens that the experts of a layer got, by expert id."""
        before = self.layers.get(layer, [0] * len(counts))
        self.layers[layer] = [old + new for old, new in zip(before, counts, strict=True)]

    def save(self, path: Path) -> None:
        """Write the profile to a file; raise ConfigError where it cannot be written.

        A file that is there stays whole until the new one is complete.
        """
        data = {"expert_loads": {str(layer): self.layers[layer] for layer in sorted(self.layers)}}
        with atomic_write(path) as partial:
            partial.write_text(json.dumps(data) + "\n")

    @staticmethod
    def load(path: Path) -> ExpertLoads:
        """Read a profile; raise ConfigError for a file that is no load profile."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise ConfigError(
                f"cannot read {path}: {why};"
                f" `inferc eval OUT --text FILE --record-expert-loads {path}` writes a profile"
            ) from None
        try:
            data = parse_json(text)["expert_loads"]
            layers = {int(layer): [int(load) for load in loads] for layer, loads in data.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path}: no load profile ({error}); expected {{'expert_loads': {{layer: [tokens]}}}}"
            ) from error
        if any(load < 0 for loads in layers.values() for load in loads):
            raise ConfigError(f"{path}: a load is negative; expected numbers of tokens")
        return ExpertLoads(layers)
