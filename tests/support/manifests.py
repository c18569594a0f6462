"""Manifests as another inferc, or an attacker, would write them: changed, with a digest that matches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from inferc.manifest import seal_manifest


def read_manifest(artifact: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((artifact / "engine.json").read_bytes())
    return manifest


def rewrite_manifest(artifact: Path, **changes: Any) -> None:
    """Write these entries into the manifest."""
    (artifact / "engine.json").write_bytes(changed_manifest(artifact, **changes))


def changed_manifest(artifact: Path, **changes: Any) -> bytes:
    """The manifest with these entries."""
    manifest = {**read_manifest(artifact), **changes}
    del manifest["sha256"]
    return seal_manifest(manifest)
