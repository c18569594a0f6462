"""The tests of weights that are truncated, overwritten, replaced or removed while a server runs.

The server notices and reports it, and serves again when they are back.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from http_calls import request
from manifests import changed_manifest
from serving import Server, wait_until

from inferc.client import Client
from inferc.errors import InfercError
from inferc.runtime.artifact.files import ChunkSums
from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.artifact.sign import sign_artifact
from inferc.serve.models import artifact_watch
from inferc.serve.models.artifact_watch import ArtifactWatch
from inferc.signature import new_key, read_private_key

ASK = {"prompt": "abc", "max_tokens": 4, "temperature": 0.0}


@pytest.fixture
def copied(tiny_artifact: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_artifact, tmp_path / "model")


def weights_of(folder: Path) -> Path:
    return next(folder.glob("weights-*"))


def flip(path: Path) -> None:
    """Overwrite a byte where it lies."""
    with path.open("r+b") as file:
        file.seek(-9, os.SEEK_END)
        byte = file.read(1)
        file.seek(-9, os.SEEK_END)
        file.write(bytes([byte[0] ^ 0x40]))


def test_nothing_is_wrong_with_what_nobody_touched(copied: Path) -> None:
    watch = ArtifactWatch(load_artifact(copied))
    assert watch.fault() is None and watch.fault(thorough=True) is None


def test_files_that_are_as_they_were_may_have_been_touched(copied: Path) -> None:
    watch, path = ArtifactWatch(load_artifact(copied)), weights_of(copied)
    os.utime(path, (1, 1))
    os.link(path, copied / "another-name")
    assert watch.fault() is None
    shutil.copyfile(path, copied / "again")
    (copied / "again").replace(path)
    assert watch.fault() is None


def test_what_happened_to_a_file_is_told(copied: Path) -> None:
    watch, path = ArtifactWatch(load_artifact(copied)), weights_of(copied)
    whole = path.read_bytes()
    os.truncate(path, 100)
    fault = watch.fault()
    assert fault is not None and fault.in_place
    assert fault.reason.startswith(f"{path} is truncated: it has 100 bytes, expected {len(whole)}")
    path.write_bytes(whole)
    assert watch.fault() is None
    flip(path)
    fault = watch.fault()
    assert fault is not None and fault.in_place and f"{path} is damaged within bytes 0 to" in fault.reason
    flip(path)
    assert watch.fault() is None
    path.rename(copied / "aside")
    fault = watch.fault()
    assert fault is not None and not fault.in_place and f"{path} is missing" in fault.reason
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    fault = watch.fault()
    assert fault is not None and not fault.in_place, "another file: an engine that runs has not mapped it"
    watch.mapped_anew()
    (copied / "aside").replace(path)
    assert watch.fault() is None


def test_what_an_engine_maps_is_what_is_there_when_it_starts(copied: Path) -> None:
    watch, path = ArtifactWatch(load_artifact(copied)), weights_of(copied)
    shutil.copyfile(path, copied / "again")
    (copied / "again").replace(path)
    watch.mapped_anew()  # nobody has looked in between
    flip(path)
    fault = watch.fault()
    assert fault is not None and fault.in_place


def test_a_file_that_was_found_damaged_is_not_hashed_again(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, path = ArtifactWatch(load_artifact(copied)), weights_of(copied)
    flip(path)
    fault = watch.fault()
    assert fault is not None
    hashed: list[Path] = []
    check = artifact_watch._check_sums

    def noted(path: Path, sums: ChunkSums) -> None:
        hashed.append(path)
        check(path, sums)

    monkeypatch.setattr(artifact_watch, "_check_sums", noted)
    assert watch.fault() == fault and not hashed
    flip(path)
    assert watch.fault() is None and hashed == [path]


def test_damage_from_before_is_found_by_a_thorough_look(copied: Path) -> None:
    flip(weights_of(copied))
    watch = ArtifactWatch(load_artifact(copied))
    assert watch.fault() is None, "a look at times and sizes"
    fault = watch.fault(thorough=True)
    assert fault is not None and "is damaged within bytes 0 to" in fault.reason


# -------------------------------------------------------------------------------------- under a running server


@pytest.fixture
def running(copied: Path) -> Iterator[tuple[Server, Path]]:
    with Server(copied) as server:
        yield server, weights_of(copied)


def status(server: Server) -> int:
    with grpc.insecure_channel(server.address) as channel:
        found = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5).status
    return int(found)


def is_refused(server: Server) -> bool:
    answer = request(server.url, "/v1/completions", ASK)
    return answer.status == 503 and "files are damaged or missing" in answer.body.decode()


def answer_of(server: Server) -> str:
    answer = request(server.url, "/v1/completions", ASK)
    assert answer.status == 200, answer.body
    return str(json.loads(answer.body)["choices"][0]["text"])


@pytest.mark.parametrize("how", [pytest.param("truncated", marks=pytest.mark.slow), "overwritten"])
def test_weights_that_are_harmed_under_a_running_server(running: tuple[Server, Path], how: str) -> None:
    server, path = running
    want, whole = answer_of(server), path.read_bytes()
    if how == "truncated":
        os.truncate(path, 4096)
    else:
        flip(path)
    wait_until(lambda: is_refused(server), "requests are refused in words for clients")
    assert status(server) == health_pb2.HealthCheckResponse.NOT_SERVING
    assert request(server.url, "/live").status == 200, "to start it again would not mend it"
    told = (
        f"{path} is truncated: it has 4096 bytes, expected {len(whole)}" if how == "truncated" else f"{path} is damaged"
    )
    assert told in server.log
    with path.open("r+b") as file:  # the same file, as it was
        file.write(whole)
    wait_until(lambda: status(server) == health_pb2.HealthCheckResponse.SERVING, "it serves again", 40)
    assert answer_of(server) == want
    assert server.log.count(told) <= 2, "said, and not in a loop"


@pytest.mark.slow
def test_another_artifact_in_its_place_is_not_served_by_the_old_ones_text(
    running: tuple[Server, Path], reference_manifest: bytes
) -> None:
    server, path = running
    want = answer_of(server)
    manifest = path.parent / "engine.json"
    own = manifest.read_bytes()
    manifest.write_bytes(reference_manifest)
    server.engine.kill()
    wait_until(lambda: is_refused(server), "requests are refused")
    assert "is another artifact than before" in server.log
    manifest.write_bytes(own)
    wait_until(lambda: status(server) == health_pb2.HealthCheckResponse.SERVING, "it serves again", 40)
    assert answer_of(server) == want


@pytest.fixture
def reference_manifest(tiny_artifact: Path) -> bytes:
    """Return the engine.json of an artifact that differs in what made it."""
    return changed_manifest(tiny_artifact, producer="inferc of another time")


# -------------------------------------------------------------------------------------------- trusted keys


@pytest.mark.slow
def test_models_that_are_loaded_while_it_runs_are_held_to_the_same_keys(tiny_artifact: Path, tmp_path: Path) -> None:
    new_key(tmp_path / "release.key")
    key = read_private_key(tmp_path / "release.key")
    first, folder = shutil.copytree(tiny_artifact, tmp_path / "first"), tmp_path / "models"
    for name in ("signed", "unsigned"):
        shutil.copytree(tiny_artifact, folder / name)
    for path in (first, folder / "signed"):
        sign_artifact(path, key)
    options = ("--model-folder", str(folder), "--kv-memory", "8MB", "--trusted-keys", str(tmp_path / "release.key.pub"))
    with Server(first, *options) as server, Client(server.address) as client:
        client.load_model("signed")
        with pytest.raises(InfercError, match=r"FAILED_PRECONDITION: the model cannot be loaded"):
            client.load_model("unsigned")
        assert f"{folder / 'unsigned'} is not signed, and only what a key of" in server.log
        states = {model.model: model.state for model in client.models()}
        assert states == {"first": "serving", "signed": "serving", "unsigned": "unloaded"}
        flip(weights_of(first))
        wait_until(lambda: is_refused(server), "what changed after it was signed is not served")
        flip(weights_of(first))
        wait_until(lambda: status(server) == health_pb2.HealthCheckResponse.SERVING, "it serves again", 40)
