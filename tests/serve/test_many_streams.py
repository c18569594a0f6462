"""A thousand streams at a time, for two minutes: nobody fails, and the server does not grow."""

import threading
from pathlib import Path

import psutil
import pytest
from serving import Server, wait_until

from inferc.bench.endpoints import Target
from inferc.bench.session import Settings, measure
from inferc.bench.workload import Lengths
from inferc.client import Client

STREAMS, SECONDS, OUTPUT_LEN = 1000, 120.0, 100
MOST_GROWTH = 0.15  # of the resident memory, after a third of the time
WATCH_SECONDS = 0.5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["completions", "grpc"])
def test_a_thousand_streams(tiny_artifact: Path, kind: str) -> None:
    resident: list[int] = []
    over = threading.Event()
    with Server(tiny_artifact, "--max-num-seqs", "256", "--max-num-batched-tokens", "1024") as server:
        process = psutil.Process(server.process.pid)

        def watch() -> None:
            while not over.wait(WATCH_SECONDS):
                resident.append(process.memory_info().rss)

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            target = Target("grpc", server.address) if kind == "grpc" else Target("completions", f"{server.url}/v1")
            settings = Settings(Lengths(8, OUTPUT_LEN), concurrency=STREAMS, seconds=SECONDS, warmup=STREAMS)
            measured = measure(target, settings, lambda stage, done, total: None)
        finally:
            over.set()
            watching.join()
        (result,) = measured.results
        assert result.failed == {} and result.unfinished == 0 and result.short_answers == 0, result.warnings
        assert result.completed > 2 * STREAMS
        third, last = resident[len(resident) // 3], max(resident[-10:])
        assert last < third * (1 + MOST_GROWTH), (third, last)
        with Client(server.address) as client:
            wait_until(lambda: client.loads().num_running + client.loads().num_waiting == 0, "nothing runs")
            loads = client.loads()
        assert loads.num_restarts == 0 and loads.kv_usage == 0
