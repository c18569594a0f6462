"""Load on a real server over gRPC: what its clients see, queueing, text and the network's share included."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from inferc.client import Client
from inferc.errors import InfercError, RequestError


@dataclass(frozen=True)
class Percentiles:
    p50: float
    p90: float
    p99: float

    @staticmethod
    def of_ms(seconds: Sequence[float]) -> Percentiles:
        return Percentiles(*(1e3 * float(value) for value in np.percentile(seconds, (50, 90, 99))))


@dataclass(frozen=True)
class ServeResult:
    """What clients saw: the time to the first message with tokens, between two tokens, and to the end of the stream.

    A message may carry several tokens, and then each of them counts as its share of the gap before the message. Those
    that come in the first message have no gap before them, so none of theirs is counted.
    """

    output_tokens_per_s: float
    requests: int
    requests_per_s: float
    ttft_ms: Percentiles
    itl_ms: Percentiles | None  # None if every answer came in one message
    e2e_ms: Percentiles
    input_len: int
    output_len: int
    concurrency: int


@dataclass(frozen=True)
class _Times:
    """Of one request, in seconds since it was sent. messages: when each came that has tokens, and how many it has."""

    messages: list[tuple[float, int]]
    whole: float

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.messages)


@contextmanager
def serving(artifact: Path, options: Sequence[str]) -> Iterator[str]:
    """Start `inferc serve` on a free port of the loopback interface and yield its address; stop it in the end."""
    command = [
        sys.executable,
        "-m",
        "inferc",
        "serve",
        str(artifact),
        "--grpc-port",
        "0",
        "--http-port",
        "0",
        "--json",
        *options,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise InfercError(f"inferc serve ended with exit code {process.wait()} before it was ready; see above")
        yield str(json.loads(line)["grpc"])
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def run_load(address: str, input_len: int, output_len: int, concurrency: int, requests: int) -> ServeResult:
    """`requests` greedy requests of random token ids from a fixed seed, of which `concurrency` are under way at once.

    As many requests of two tokens warm up first. Raises RequestError if the model does not take the lengths.
    """
    with Client(address) as client:
        info = client.model_info()
    if input_len < 1 or output_len < 2 or input_len + output_len > info.max_model_len:
        raise RequestError(
            f"input_len {input_len} and output_len {output_len}: expected at least 1 and 2,"
            f" and together at most {info.max_model_len}, what the model takes"
        )
    random = np.random.default_rng(0)
    prompts = [random.integers(0, info.vocab_size, input_len).tolist() for _ in range(concurrency + requests)]
    local = threading.local()

    def one(prompt: list[int], num_tokens: int) -> _Times:
        if not hasattr(local, "client"):
            local.client = Client(address)
        return _request(local.client, prompt, num_tokens)

    with ThreadPoolExecutor(concurrency) as pool:
        list(pool.map(lambda prompt: one(prompt, 2), prompts[:concurrency]))
        start = time.perf_counter()
        times = list(pool.map(lambda prompt: one(prompt, output_len), prompts[concurrency:]))
        seconds = time.perf_counter() - start
    gaps = [gap for item in times for gap in _gaps(item.messages)]
    return ServeResult(
        output_tokens_per_s=sum(item.num_tokens for item in times) / seconds,
        requests=len(times),
        requests_per_s=len(times) / seconds,
        ttft_ms=Percentiles.of_ms([item.messages[0][0] for item in times]),
        itl_ms=Percentiles.of_ms(gaps) if gaps else None,
        e2e_ms=Percentiles.of_ms([item.whole for item in times]),
        input_len=input_len,
        output_len=output_len,
        concurrency=concurrency,
    )


def _request(client: Client, prompt: list[int], num_tokens: int) -> _Times:
    start = time.perf_counter()
    messages = []
    for piece in client.generate(prompt, temperature=0.0, max_tokens=num_tokens, ignore_eos=True):
        if piece.token_ids:
            messages.append((time.perf_counter() - start, len(piece.token_ids)))
    return _Times(messages, time.perf_counter() - start)


def _gaps(messages: Sequence[tuple[float, int]]) -> list[float]:
    """The time between a token and the one before it, for every token of the messages after the first."""
    return [(now - before) / count for (before, _), (now, count) in pairwise(messages) for _ in range(count)]
