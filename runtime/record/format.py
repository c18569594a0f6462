"""The format of a recording: what an engine was asked and what it answered, as lines of JSON.

Each run of an engine begins with a header, followed by a line for each request, in the order in which they ended. A log
probability is the computed float32, written as the decimal of the equal double, so it is restored bit for bit. A last
line without a line end was being written when the process was killed; it is ignored.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from inferc.errors import ArtifactError, ConfigError, InfercError
from inferc.runtime.step.sampling_params import SamplingParams, from_request
from inferc.system.json_text import parse_json

VERSION = 1
KEY = "inferc_recording"  # the key of a header line; its value is the version


@dataclass(frozen=True)
class Identity:
    """The facts that, together with a request, determine the bits of its answer; nothing else may affect them."""

    sha256: str  # the digest of the artifact's manifest, which holds the digests of all other files
    target: str
    isa: str  # the instruction set or the chip; "" if the target has only one
    deterministic: bool
    kv_evict: str | None  # the policy by which a long context's KV blocks are evicted

    def difference(self, found: Identity) -> str:
        """Describe the first field that differs in `found`, with both values; "" if none does."""
        for field in dataclasses.fields(self):
            ours, theirs = getattr(self, field.name), getattr(found, field.name)
            if ours != theirs:
                return f"found {field.name} {theirs!r}, expected {ours!r}"
        return ""


@dataclass(frozen=True)
class Header:
    identity: Identity
    artifact: str  # its path
    producer: str
    started: float  # seconds since 1970
    engine: dict[str, Any]  # the fields of EngineConfig, none of which affects any bit


@dataclass(frozen=True)
class RecordedSequence:
    """The recorded output of one sequence.

    finish_reason: "stop" (an end token), "length", "stop_string" (the client found one: the tokens are those generated
    until it reported so), "abort", "refused" (by the policy) or "error" (the logits after these tokens are not finite).
    Times are seconds since the request's arrival; first_token_s is None if there was no token.
    """

    index: int
    seed: int
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    cached: int  # the prompt tokens found in the prefix cache
    preemptions: int
    first_token_s: float | None
    end_s: float


@dataclass(frozen=True)
class RecordedRequest:
    """A recorded request with its sequences.

    `seed` is the one that was used, drawn or given. `name` is the client's name for the request, `id` the engine's.
    """

    id: str
    name: str
    arrived: float  # seconds since 1970
    seed: int
    params: SamplingParams
    prompt: list[int]
    sequences: list[RecordedSequence]

    @property
    def label(self) -> str:
        return self.name or self.id


@dataclass(frozen=True)
class Recording:
    header: Header  # the header of the first run
    requests: list[RecordedRequest]
    is_torn: bool  # whether the last line was cut off


def encode_header(header: Header) -> bytes:
    """Return the header as a line of the file."""
    return json.dumps({KEY: VERSION, **dataclasses.asdict(header)}, separators=(",", ":")).encode() + b"\n"


def encode_request(request: RecordedRequest) -> bytes:
    """Return a request as a line of the file."""
    entry = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
    entry["params"] = vars(request.params)
    entry["sequences"] = [
        {**vars(seq), "logprobs": [each if math.isfinite(each) else str(each) for each in seq.logprobs]}
        for seq in request.sequences
    ]
    return msgspec.json.encode(entry) + b"\n"


def read_recording(path: Path) -> Recording:
    """Read a whole recording.

    Raises ConfigError if it is unreadable, ArtifactError if it is no recording or damaged.
    """
    header: Header | None = None
    requests: list[RecordedRequest] = []
    for number, line in enumerate(_lines(path), 1):
        if not line.endswith(b"\n"):
            if header is None:
                break
            return Recording(header, requests, is_torn=True)
        entry = _parse(path, number, line)
        if KEY in entry or header is None:
            found = decode_header(path, number, entry)
            if header is not None and (difference := header.identity.difference(found.identity)):
                raise ArtifactError(f"{path}, line {number}: a run of another artifact or machine: {difference}")
            header = header or found
        else:
            requests.append(_decode_request(path, number, entry))
    if header is None:
        raise ArtifactError(f"{path} is no recording: it has no header; give a file that --record wrote")
    return Recording(header, requests, is_torn=False)


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        entry = parse_json(line)
    except ValueError:
        entry = None
    if not isinstance(entry, dict):
        raise ArtifactError(_damaged(path, number, f"found {line[:40]!r}, expected a JSON object"))
    return entry


def decode_header(path: Path, number: int, entry: Mapping[str, Any]) -> Header:
    """Return the header of a line. Raises ArtifactError if it is no header, or has another version."""
    if KEY not in entry:
        raise ArtifactError(f"{path} is no recording: line {number} is no header; give a file that --record wrote")
    if entry[KEY] != VERSION:
        raise ArtifactError(
            f"{path} has version {entry[KEY]!r} of the format, this inferc reads {VERSION}; use the inferc that wrote"
            " it"
        )
    try:
        values = {field.name: entry[field.name] for field in dataclasses.fields(Header)}
        return Header(**{**values, "identity": Identity(**entry["identity"])})
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(_damaged(path, number, str(error))) from None


def _decode_request(path: Path, number: int, entry: Mapping[str, Any]) -> RecordedRequest:
    try:
        values = {field.name: entry[field.name] for field in dataclasses.fields(RecordedRequest)}
        sequences = [
            RecordedSequence(**{**seq, "logprobs": [float(each) for each in seq["logprobs"]]})
            for seq in values["sequences"]
        ]
        if not values["prompt"] or any(len(seq.token_ids) != len(seq.logprobs) for seq in sequences):
            raise ValueError("a prompt or the log probabilities of tokens are missing")
        params = values["params"]  # checked like a request's, since anybody may have written the file
        bias = {int(token): value for token, value in params["logit_bias"].items()}
        checked = from_request({**params, "logit_bias": bias})
        return RecordedRequest(**{**values, "params": checked, "sequences": sequences})
    except (KeyError, TypeError, ValueError, AttributeError, InfercError) as error:
        raise ArtifactError(_damaged(path, number, str(error))) from None


def _damaged(path: Path, number: int, why: str) -> str:
    return f"{path}, line {number} is damaged: {why}; remove the line, or record again"
