"""Tests of the report of an artifact whose files were harmed after it was loaded, so that parts cannot be read."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from http_calls import request
from msgspec.structs import replace
from serving import Server

from inferc.errors import ArtifactError
from inferc.manifest import CERTIFICATE, COSTS
from inferc.manifest_types import FileEntry
from inferc.runtime.artifact.load import load_artifact
from inferc.serve.http.artifact_report import of_artifact

CERTIFIED = {
    "ok": True,
    "scope": "layers",
    "num_positions": 3,
    "prompts": ["a"],
    "budgets": {},
    "rows": [{"name": "captured", "ran_by": "torch", "ok": True}],
}


class FakeArtifact:
    """An artifact whose files say what a test makes them say."""

    def __init__(self, of: Path, files: dict[str, Any]) -> None:
        self._artifact = load_artifact(of)
        self._files = files
        listed = {**self._artifact.manifest.files, **{key: FileEntry(1) for key in self._files}}
        self.manifest = replace(self._artifact.manifest, files=listed)
        self.manifest_json = self._artifact.manifest_json
        self.path = of

    def read(self, name: str) -> bytes:
        if isinstance(found := self._files.get(name), Exception):
            raise found
        return self._artifact.read(name) if found is None else json.dumps(found).encode()


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        (CERTIFICATE, lambda old: ArtifactError("/models/secret: it has another digest")),
        (CERTIFICATE, lambda old: {}),
        (CERTIFICATE, lambda old: []),
        (CERTIFICATE, lambda old: {**CERTIFIED, "rows": [{}]}),
        (COSTS, lambda old: ArtifactError("/models/secret: it has another digest")),
        (COSTS, lambda old: {**old, "programs": []}),
        (COSTS, lambda old: {**old, "facts": {}}),
        (COSTS, lambda old: {**old, "ops": [5]}),
    ],
)
def test_the_rest_is_reported(
    tiny_artifact: Path, name: str, harm: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    old = json.loads((tiny_artifact / COSTS).read_bytes())
    artifact: Any = FakeArtifact(tiny_artifact, {CERTIFICATE: CERTIFIED, name: harm(old)})
    with caplog.at_level(logging.ERROR):
        story = of_artifact(artifact)
    assert story["unreadable"] == [name] and name in caplog.text and "/models" not in json.dumps(story)
    assert (story["certificate"] is None) == (name == CERTIFICATE) and (story["workload"] is None) == (name == COSTS)
    assert story["passes"] and story["kernels"]


def test_over_http(tiny_artifact: Path, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(tiny_artifact, folder)
    with Server(folder) as server:
        whole = request(server.url, "/artifact").json
        graph = next(row["graph"] for row in whole["passes"] if row["graph"])
        (folder / COSTS).write_text("{")
        (folder / "graph" / f"{graph}.txt").write_text("{")
        reply = request(server.url, "/artifact")
        assert reply.status == 200 and reply.json["unreadable"] == [COSTS] and not whole["unreadable"]
        reply = request(server.url, f"/artifact/graphs/{graph}")
        assert (
            reply.status == 503
            and reply.error["message"] == f"graph {graph!r} cannot be read: its file is damaged or gone"
        )
