"""The replay of a recording: its sequences run again, and every token and log probability is compared bit for bit.

Each sequence runs as a request of its own, with its recorded seed and number of tokens. What ended it from outside (a
stop string, an abort, `n` siblings) need not happen again, and whatever ran beside it must not matter.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from inferc.errors import ArtifactError, ConfigError, RequestError
from inferc.runtime.artifact.load import Artifact
from inferc.runtime.engine.engine import Engine
from inferc.runtime.record.format import Header, RecordedRequest, RecordedSequence
from inferc.runtime.runners.api import capabilities_of
from inferc.runtime.runners.cpu.abi import detect_isa
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.step.sequence import Output

ENDS = ("stop", "length", "error")  # the finish reasons that follow from the tokens themselves, and so must recur


@dataclass(frozen=True)
class Drawn:
    """A token with its float32 log probability, or the end of a sequence with its reason."""

    token: int | None
    logprob: float | None
    end: str | None = None


@dataclass(frozen=True)
class Difference:
    """The first difference of a sequence. `position` counts from its first new token."""

    request: str
    index: int
    position: int
    recorded: Drawn
    found: Drawn


@dataclass
class Replayed:
    """The result of a replay. `unfinished` sequences ended before their first token, so nothing of them is compared."""

    requests: int = 0
    sequences: int = 0
    tokens: int = 0
    unfinished: int = 0
    differences: list[Difference] = field(default_factory=list)


@dataclass
class _Run:
    request: RecordedRequest
    recorded: RecordedSequence
    position: int = 0
    difference: Difference | None = None

    def take(self, output: Output) -> None:
        """Compare an output with the recording: at most one token, and the end."""
        recorded = self.recorded
        for token, drawn in zip(output.token_ids, output.logprobs or (), strict=True):
            self._compare(Drawn(token, drawn.logprob))
        if output.finish_reason is None:
            return
        if self.position < len(recorded.token_ids):
            self._compare(Drawn(None, None, output.finish_reason))
        elif recorded.finish_reason in ENDS and output.finish_reason != recorded.finish_reason:
            self._differ(
                Drawn(None, None, recorded.finish_reason), Drawn(None, None, output.finish_reason), self.position
            )

    def _compare(self, found: Drawn) -> None:
        at, recorded = self.position, self.recorded
        self.position += 1
        if at >= len(recorded.token_ids):
            self._differ(Drawn(None, None, recorded.finish_reason), found, at)
            return
        expected = Drawn(recorded.token_ids[at], recorded.logprobs[at])
        if expected.token != found.token or _bits(expected.logprob) != _bits(found.logprob):
            self._differ(expected, found, at)

    def _differ(self, expected: Drawn, found: Drawn, at: int) -> None:
        self.difference = self.difference or Difference(self.request.label, self.recorded.index, at, expected, found)


def replay_params(request: RecordedRequest, recorded: RecordedSequence) -> SamplingParams:
    """Return the sampling parameters that reproduce one sequence of a request, whatever ended it."""
    asked, count = request.params, len(recorded.token_ids)
    count += recorded.finish_reason == "error"  # one more token, at which the error must recur
    return replace(
        asked,
        n=1,
        seed=recorded.seed,
        max_tokens=count,
        min_tokens=min(asked.min_tokens, count),
        stop=(),
        logprobs=0,
        priority=0,
        client="",
        ttft_ms=None,
        tbt_ms=None,
        tap=False,
    )


def _bits(value: float | None) -> bytes:
    """Return the bytes of a float32, with every NaN mapped to the same one."""
    return b"" if value is None else np.float32(math.nan if math.isnan(value) else value).tobytes()


def choose(requests: Sequence[RecordedRequest], wanted: str | None) -> list[RecordedRequest]:
    """Return all requests, or those with this name, or else with this id. Raises RequestError if there is none."""
    if wanted is None:
        return list(requests)
    found = [each for each in requests if each.name == wanted] or [each for each in requests if each.id == wanted]
    if not found:
        near = difflib.get_close_matches(wanted, [each.label for each in requests], 3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"it has {len(requests)} requests"
        raise RequestError(f"the recording has no request {wanted!r}; {hint}")
    return found


def check_artifact(header: Header, artifact: Artifact) -> None:
    """Raise an error if this artifact on this machine cannot reproduce the recorded bits."""
    expected, found = header.identity, artifact.manifest.sha256
    if found != expected.sha256:
        raise ArtifactError(
            f"{artifact.path} is not the artifact that was recorded: found sha256 {found[:16]}…, expected"
            f" {expected.sha256[:16]}…; give that one with --engine, or record again"
        )
    if expected.isa and "threads" in capabilities_of(artifact, expected.target) and expected.isa not in detect_isa():
        raise ConfigError(
            f"the recording was made with isa {expected.isa}, found {', '.join(detect_isa()) or 'none'} on this"
            " machine; another instruction set may round otherwise, so replay it where there is that one"
        )


def replay(
    engine: Engine, requests: Sequence[RecordedRequest], progress: Callable[[int, int], None] = lambda *_: None
) -> Replayed:
    """Run the sequences of these requests, as many at once as the engine accepts.

    Raises RequestError if it refuses one.
    """
    result = Replayed(requests=len(requests))
    runs: dict[str, _Run] = {}
    for request in requests:
        for recorded in request.sequences:
            run = _Run(request, recorded)
            if not recorded.token_ids and recorded.finish_reason != "error":
                result.unfinished += 1
                continue
            name = str(len(runs))
            engine.add_request(name, request.prompt, replay_params(request, recorded))
            runs[name] = run
            result.sequences += 1
            result.tokens += len(recorded.token_ids)
    total, ended = len(runs), 0
    while engine.has_work:
        for output in engine.step():
            runs[output.request_id].take(output)
            ended += output.finish_reason is not None
        progress(ended, total)
    result.differences = [run.difference for run in runs.values() if run.difference is not None]
    return result
