"""The recorder, which writes what an engine does to a file in a thread of its own, so no step waits for a disk."""

from __future__ import annotations

import fcntl
import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from inferc.errors import ConfigError, RequestError
from inferc.runtime.record import format as recording
from inferc.runtime.record.format import Header, RecordedRequest, RecordedSequence
from inferc.runtime.record.watcher import Watcher
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.step.sequence import Sequence as Seq
from inferc.runtime.step.sequence import StepOutputs
from inferc.system.json_text import parse_json
from inferc.system.private_files import open_private

log = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0  # how long closing waits for the remaining writes


@dataclass
class _Open:
    """A request that has not ended."""

    name: str
    seed: int
    arrived: float
    began: float  # time on the monotonic clock
    left: int
    first_tokens: dict[int, float] = field(default_factory=dict)  # time by the sequence's index
    ended: list[RecordedSequence] = field(default_factory=list)


class Recorder(Watcher):
    """The writer of a recording, which the engine's thread notifies of what begins and ends.

    A request is written when its last sequence has ended. An existing recording is continued if it is of the same
    artifact, instruction set and target. A later failure of the file ends the recording with one warning, and serving
    goes on. Raises ConfigError or ArtifactError if it cannot begin.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self._path = path
        self._file, self._size = _open(path, header)
        self._failed = False
        self._open: dict[str, _Open] = {}
        self._ended: queue.SimpleQueue[RecordedRequest | None] = queue.SimpleQueue()
        self._num_written = 0
        try:
            self._append(recording.encode_header(header))
        except OSError as error:
            os.close(self._file)
            raise ConfigError(f"cannot write the recording {path}: {error.strerror}") from None
        self._writer = threading.Thread(target=self._write, name="inferc-recorder", daemon=True)
        self._writer.start()

    def check(self, prompt_len: int, max_total: int, params: SamplingParams) -> None:
        if params.logits_processors:
            raise RequestError("logits_processors: a recording cannot keep functions; leave them out, or --record")

    def begin(self, name: str, seed: int, seqs: Sequence[Seq]) -> None:
        self._open[seqs[0].request_id] = _Open(name, seed, time.time(), time.monotonic(), len(seqs))

    def updated(self, outputs: StepOutputs) -> None:
        now = time.monotonic()
        for output in outputs.others.values():  # the other rows have nothing but a token
            if output is not None and output.num_cached is not None and output.request_id in self._open:
                entry = self._open[output.request_id]
                entry.first_tokens[output.index] = now - entry.began

    def end(self, seq: Seq, reason: str) -> None:
        entry = self._open[seq.request_id]
        first = entry.first_tokens.get(seq.index)
        ended = RecordedSequence(
            index=seq.index,
            seed=seq.seed,
            token_ids=seq.token_ids[seq.prompt_len :],
            logprobs=seq.logprobs,
            finish_reason=reason,
            cached=seq.num_cached,
            preemptions=seq.num_preemptions,
            first_token_s=None if first is None else round(first, 6),
            end_s=round(time.monotonic() - entry.began, 6),
        )
        entry.ended.append(ended)
        entry.left -= 1
        if entry.left:
            return
        del self._open[seq.request_id]
        if not self._failed:
            sequences = sorted(entry.ended, key=lambda each: each.index)
            prompt = seq.token_ids[: seq.prompt_len]
            of_request = (seq.request_id, entry.name, entry.arrived, entry.seed, seq.params, prompt, sequences)
            self._ended.put(RecordedRequest(*of_request))

    def close(self) -> None:
        self._ended.put(None)
        self._writer.join(CLOSE_SECONDS)

    def _write(self) -> None:
        while (request := self._ended.get()) is not None:
            if self._failed:
                continue
            try:
                self._append(recording.encode_request(request))
                self._num_written += 1
            except OSError as error:
                self._failed = True
                with suppress(OSError):  # cutting off the partial line may fail, because a reader ignores it
                    os.ftruncate(self._file, self._size)
                log.warning(
                    "cannot write the recording %s: %s; recording has stopped after %d requests, serving goes on",
                    self._path,
                    error.strerror,
                    self._num_written,
                )
        os.close(self._file)

    def _append(self, line: bytes) -> None:
        """Write a whole line to the operating system, where it survives the end of this process."""
        rest = memoryview(line)
        while rest:
            rest = rest[os.write(self._file, rest) :]
        self._size += len(line)


def _open(path: Path, header: Header) -> tuple[int, int]:
    """Open the file for appending after its last whole line, and return its descriptor and size."""
    if path.exists() and not path.is_file():  # reading a device may never end
        raise ConfigError(f"cannot write the recording {path}: it is no file; give another")
    try:
        file = open_private(path, os.O_RDWR | os.O_APPEND)
    except OSError as error:
        raise ConfigError(f"cannot write the recording {path}: {error.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        size = _check_continues(path, header)
        os.ftruncate(file, size)
        return file, size
    except OSError as error:
        os.close(file)
        why = "another engine is writing it" if isinstance(error, BlockingIOError) else error.strerror
        raise ConfigError(f"cannot write the recording {path}: {why}; give another file") from None
    except Exception:
        os.close(file)
        raise


def _check_continues(path: Path, header: Header) -> int:
    """Return how many bytes of an existing file to keep. Raises ConfigError if it is of another artifact or machine."""
    with path.open("rb") as file:
        first = file.readline()
        if not first:
            return 0
        try:
            entry = parse_json(first)
        except ValueError:
            entry = None
        if not isinstance(entry, dict) or not first.endswith(b"\n") or recording.KEY not in entry:
            raise ConfigError(f"{path} is there and is no recording, which is never overwritten; give another file")
        there = recording.decode_header(path, 1, entry)
        if difference := header.identity.difference(there.identity):
            raise ConfigError(f"{path} is a recording of another artifact or machine: {difference}; give another file")
        return _end_of_lines(file.seek(0, os.SEEK_END), path)


def _end_of_lines(size: int, path: Path, step: int = 1 << 16) -> int:
    """Return how many bytes of a file are whole lines."""
    with path.open("rb") as file:
        end = size
        while end > 0:
            start = max(0, end - step)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
    return 0
