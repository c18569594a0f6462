"""Measure the cost of serving beyond the engine, and the load that a server can sustain.

    python benchmarks/serving_cost.py ARTIFACT [--large ARTIFACT] [--turns 3] [--seconds 120] [--out FILE]

- **The server's own time per token**: CPU seconds of the server's process (not the engine's) divided by tokens, with
  200 streams, in turn over HTTP and over gRPC; medians.
- **1,000 streams** for --seconds, each of which sends its next request when it has its answer: errors, tokens per
  second, the server's resident memory after a third of the time and at the end, and the latency of health checks over
  new connections.
- **Swap**: seconds to put a model to sleep, to wake it, to unload and to load it; medians of 5.
- **Served over offline** (--large): output tokens per second over HTTP, with 16 concurrent requests of 128 tokens in
  and 128 out, divided by those of `inferc bench throughput` with the same load, in turn; for a server whose KV cache
  was filled once, and for one that has just started.

Clients and the server share this machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from measured import ROOT, report

from inferc.client import AsyncClient, Client

INFERC = (sys.executable, "-m", "inferc")
SMALL_STREAMS, SMALL_TOKENS = 200, 200
MANY_STREAMS, MANY_TOKENS = 1000, 200
CHANNELS = 8
INPUT_LEN, OUTPUT_LEN, CONCURRENCY, REQUESTS = 128, 128, 16, 48
FILLED_KV, FILLING = "1GiB", 48  # KV memory, and requests that fill it (36 are enough for the shape of Qwen3-0.6B)


@dataclass
class Running:
    """The process and the addresses of a running server."""

    process: psutil.Process
    grpc: str
    http: str

    @property
    def cpu_seconds(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    @property
    def resident_mb(self) -> float:
        return float(self.process.memory_info().rss) / 1e6


@contextlib.contextmanager
def serving(artifact: Path, *options: str) -> Iterator[Running]:
    command = [*INFERC, "serve", str(artifact), "--grpc-port", "0", "--http-port", "0", "--json", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        yield Running(psutil.Process(process.pid), ready["grpc"], ready["http"])
    finally:
        process.terminate()
        process.wait()


def body(number: int, num_tokens: int) -> dict[str, Any]:
    return {"prompt": [5, 6, 7, number % 1000 + 10], "max_tokens": num_tokens, "ignore_eos": True, "stream": True}


async def over_http(address: str, number: int, num_tokens: int, prompt: list[int] | None = None) -> int:
    """Send a request over a plain socket, so that the client costs little, and return the number of chunks.

    Raises an error if the request fails.
    """
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
    wanted = body(number, num_tokens)
    data = json.dumps(wanted if prompt is None else {**wanted, "prompt": prompt}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    chunks, tail = 0, b""
    try:
        while b"[DONE]" not in tail:
            part = await reader.read(1 << 16)
            if not part:
                raise ConnectionError("the stream ended early")
            chunks += part.count(b"data: {")
            tail = (tail + part)[-40:]
            if b'"error"' in part:
                raise ConnectionError(part[:200].decode(errors="replace"))
    finally:
        writer.close()
    return chunks


async def over_grpc(client: AsyncClient, number: int, num_tokens: int) -> int:
    chunks = 0
    async for _ in client.generate(body(number, num_tokens)["prompt"], max_tokens=num_tokens, ignore_eos=True):
        chunks += 1
    return chunks


def own_time(artifact: Path, turns: int) -> dict[str, Any]:
    """Measure the CPU microseconds of the server per token, by protocol."""
    found: dict[str, list[float]] = {"http": [], "grpc": []}
    chunks: dict[str, list[int]] = {"http": [], "grpc": []}

    async def run(server: Running) -> None:
        clients = [AsyncClient(server.grpc) for _ in range(CHANNELS)]
        for turn in range(turns + 1):
            for protocol in ("http", "grpc"):
                before = server.cpu_seconds
                works = [
                    over_http(server.http, number, SMALL_TOKENS)
                    if protocol == "http"
                    else over_grpc(clients[number % CHANNELS], number, SMALL_TOKENS)
                    for number in range(SMALL_STREAMS)
                ]
                count = sum(await asyncio.gather(*works))
                if turn:  # the first turn warms up
                    found[protocol].append(1e6 * (server.cpu_seconds - before) / (SMALL_STREAMS * SMALL_TOKENS))
                    chunks[protocol].append(count)
        for client in clients:
            await client.close()

    with serving(artifact, "--max-num-seqs", str(SMALL_STREAMS)) as server:
        asyncio.run(run(server))
    return {
        protocol: {
            "us_per_token": round(statistics.median(values), 1),
            "all": [round(value, 1) for value in values],
            "chunks_per_token": round(statistics.median(chunks[protocol]) / (SMALL_STREAMS * SMALL_TOKENS), 3),
        }
        for protocol, values in found.items()
    }


def many_streams(artifact: Path, seconds: float) -> dict[str, Any]:
    """Measure a thousand concurrent streams over HTTP."""
    waits: list[float] = []
    stop = threading.Event()
    errors: list[str] = []
    tokens = 0
    resident: list[tuple[float, float]] = []

    def check_health(address: str) -> None:
        host, port = address.split(":")
        while not stop.wait(0.05):
            start = time.perf_counter()
            connection = http.client.HTTPConnection(host, int(port), timeout=30)
            connection.request("GET", "/health")
            status = connection.getresponse().status
            connection.close()
            waits.append(time.perf_counter() - start)
            if status != 200:
                errors.append(f"health {status}")

    async def run(server: Running) -> float:
        nonlocal tokens
        start = time.monotonic()

        async def stream(number: int) -> None:
            nonlocal tokens
            await asyncio.sleep(number / MANY_STREAMS * 2)  # the streams start within two seconds
            while time.monotonic() - start < seconds:
                try:
                    await over_http(server.http, number, MANY_TOKENS)
                    tokens += MANY_TOKENS
                except Exception as error:  # noqa: BLE001 (every error is counted)
                    errors.append(f"{type(error).__name__}: {error}")

        async def watch() -> None:
            while True:
                resident.append((time.monotonic() - start, server.resident_mb))
                await asyncio.sleep(1)

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(stream(number) for number in range(MANY_STREAMS)))
        watching.cancel()
        return time.monotonic() - start

    with serving(artifact, "--max-num-seqs", "256") as server:
        health = threading.Thread(target=check_health, args=(server.http,))
        health.start()
        took = asyncio.run(run(server))
        stop.set()
        health.join()
        engine_restarts = "inferc_engine_restarts_total"
        host, port = server.http.split(":")
        connection = http.client.HTTPConnection(host, int(port))
        connection.request("GET", "/metrics")
        page = connection.getresponse().read().decode()
        connection.close()
    early = next(mb for at, mb in resident if at > seconds / 3)
    p50, p99 = (1e3 * float(value) for value in np.percentile(waits, (50, 99)))
    return {
        "streams": MANY_STREAMS,
        "seconds": round(took, 1),
        "errors": len(errors),
        "first_errors": errors[:3],
        "output_tokens_per_s": round(tokens / took),
        "resident_mb_after_a_third": round(early, 1),
        "resident_mb_at_the_end": round(resident[-1][1], 1),
        "health_ms": {
            "p50": round(p50, 1),
            "p99": round(p99, 1),
            "max": round(1e3 * max(waits), 1),
            "checks": len(waits),
        },
        "engine_restarts": next(
            float(line.split()[-1]) for line in page.splitlines() if line.startswith(engine_restarts)
        ),
    }


def swap(artifact: Path) -> dict[str, Any]:
    """Measure the seconds that a client waits for sleep, wake, unload and load of a model."""
    seconds: dict[str, list[float]] = {"sleep": [], "wake": [], "unload": [], "load": [], "wake_by_request": []}

    def timed(what: str, run: Any) -> None:
        start = time.perf_counter()
        run()
        seconds[what].append(time.perf_counter() - start)

    with serving(artifact) as server, Client(server.grpc) as client:
        name = client.model_info().model
        for _ in range(5):
            timed("sleep", lambda: client.sleep_model(name))
            timed("wake", lambda: client.wake_model(name))
            client.sleep_model(name)
            timed("wake_by_request", lambda: client.complete([5], max_tokens=1))
            timed("unload", lambda: client.unload_model(name))
            timed("load", lambda: client.load_model(name))
    return {what: round(statistics.median(values), 3) for what, values in seconds.items()}


def served_over_offline(artifact: Path, turns: int) -> dict[str, Any]:
    """Compare served with offline speed, for a server whose KV cache was filled once and for a freshly started one.

    The prefix cache keeps the blocks of finished requests, so a server uses fresh memory until all of its KV cache was
    used once; offline runs reuse the blocks that were freed last.
    """
    lengths = ("--input-len", str(INPUT_LEN), "--output-len", str(OUTPUT_LEN))
    options = (*lengths, "--concurrency", str(CONCURRENCY), "--requests", str(REQUESTS), "--json")
    speeds: dict[str, list[float]] = {"filled": [], "fresh": [], "offline": []}
    for _ in range(turns):
        for name, kv_memory, warm_up in (("filled", FILLED_KV, FILLING), ("fresh", "auto", CONCURRENCY)):
            with serving(artifact, "--max-num-seqs", str(CONCURRENCY), "--kv-memory", kv_memory) as server:
                speeds[name].append(asyncio.run(closed_loop(server, warm_up)))
        done = subprocess.run(
            [*INFERC, "bench", "throughput", str(artifact), *options], capture_output=True, text=True, check=True
        )
        speeds["offline"].append(float(json.loads(done.stdout)["output_tokens_per_s"]))
    found: dict[str, Any] = {}
    for name, what in (("filled", "served_over_offline"), ("fresh", "served_over_offline_in_fresh_memory")):
        ratios = [served / offline for served, offline in zip(speeds[name], speeds["offline"], strict=True)]
        found[what] = {"median": round(statistics.median(ratios), 3), "all": [round(ratio, 3) for ratio in ratios]}
    found["output_tokens_per_s"] = {name: [round(speed, 1) for speed in all] for name, all in speeds.items()}
    return {**found, "options": " ".join(options), "filled_kv_memory": FILLED_KV}


async def closed_loop(server: Running, warm_up: int) -> float:
    """Return output tokens per second of REQUESTS over HTTP, CONCURRENCY at a time, after `warm_up` other requests."""
    places = asyncio.Semaphore(CONCURRENCY)

    async def one(number: int) -> None:
        prompt = np.random.default_rng(number).integers(5, 30_000, INPUT_LEN).tolist()
        async with places:
            await over_http(server.http, number, OUTPUT_LEN, prompt)

    await asyncio.gather(*(one(10_000 + number) for number in range(warm_up)))
    start = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(REQUESTS)))
    return REQUESTS * OUTPUT_LEN / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--large", type=Path, help="an artifact whose steps take long, for the ratio to offline speed")
    parser.add_argument("--large-only", action="store_true", help="measure only the artifact of --large")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument(
        "--out", type=Path, default=None, help=f"for example {ROOT}/benchmarks/results/serving-cost.json"
    )
    arguments = parser.parse_args()
    result: dict[str, Any] = {"swap_seconds": {}}
    if not arguments.large_only:
        result["own_time"] = own_time(arguments.artifact, arguments.turns)
        result["many_streams"] = many_streams(arguments.artifact, arguments.seconds)
        result["swap_seconds"][arguments.artifact.name] = swap(arguments.artifact)
    if arguments.large is not None:
        result["large"] = {"artifact": arguments.large.name, **served_over_offline(arguments.large, arguments.turns)}
        result["swap_seconds"][arguments.large.name] = swap(arguments.large)
    report(result, arguments.out)


if __name__ == "__main__":
    main()
