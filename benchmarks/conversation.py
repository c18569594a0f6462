"""The search for the conversation trace that benchmarks replay."""

from __future__ import annotations

from pathlib import Path

from measured import ROOT

from inferc.errors import ConfigError

PATTERN = "*conversation*.jsonl"
FOLDERS = (ROOT / "data", ROOT / "out", *sorted(ROOT.parent.glob("*/data")))


def find_trace(given: Path | None) -> Path:
    """Return the given file, or the first file that looks like a trace. Raises ConfigError if there is none."""
    if given is not None:
        if not given.is_file():
            raise ConfigError(f"there is no trace {given}")
        return given
    found = [path for folder in FOLDERS for path in sorted(folder.glob(PATTERN))]
    if not found:
        raise ConfigError(
            f"found no trace {PATTERN} in data/, out/ or ../*/data/; give --trace FILE (Mooncake's conversation trace,"
            " a JSON object a line)"
        )
    return found[0]
