"""The signing of an artifact, all of which is checked before it is signed."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from inferc.manifest import CHUNK_BYTES
from inferc.runtime.artifact.load import load_artifact
from inferc.signature import PublicKey, write_signature
from inferc.system.resources import available_cores

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


def sign_artifact(path: Path, key: Ed25519PrivateKey) -> PublicKey:
    """Write the signature of the artifact at `path`. Raises ArtifactError if the artifact is damaged."""
    artifact = load_artifact(path, to_run=False)
    artifact.verify_weights().wait()
    chunks: dict[str, list[str]] = {}
    with ThreadPoolExecutor(min(4, available_cores())) as pool:
        for name, data in artifact.maps.items():
            with memoryview(data) as whole:
                starts = range(0, len(whole), CHUNK_BYTES)
                chunks[name] = list(pool.map(lambda start: _digest(whole, start), starts))
    return write_signature(path, artifact.manifest_bytes, chunks, key)


def _digest(data: memoryview, start: int) -> str:
    with data[start : start + CHUNK_BYTES] as chunk:
        return hashlib.sha256(chunk).hexdigest()
