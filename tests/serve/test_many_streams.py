"""A thousand streams at a time, thousands of them in all: nobody fails, and the server does not grow."""

from pathlib import Path

import psutil
import pytest
from serving import Server, wait_until

from inferc.bench.endpoints import Target
from inferc.bench.session import Settings, measure
from inferc.bench.workload import Lengths
from inferc.client import Client

STREAMS, OUTPUT_LEN = 1000, 100
LOADS, REQUESTS = 5, 3 * STREAMS
MOST_GROWTH = 0.1  # of the resident memory from the end of the second load, until which caches and pools fill
TIDIED_SECONDS = 90.0  # within which an idle server has collected its garbage and returned what is free


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["completions", "grpc"])
def test_a_thousand_streams(tiny_artifact: Path, kind: str) -> None:
    with Server(tiny_artifact, "--max-num-seqs", "256", "--max-num-batched-tokens", "1024") as server:
        process = psutil.Process(server.process.pid)
        target = Target("grpc", server.address) if kind == "grpc" else Target("completions", f"{server.url}/v1")

        resident = []
        for turn in range(1, LOADS + 1):
            settings = Settings(
                Lengths(8, OUTPUT_LEN), concurrency=STREAMS, requests=REQUESTS, warmup=STREAMS, first_turn=turn
            )
            (result,) = measure(target, settings, lambda stage, done, total: None).results
            assert result.failed == {} and result.unfinished == 0 and result.short_answers == 0, result.warnings
            assert result.completed == REQUESTS
            resident.append(process.memory_info().rss)
        most = resident[1] * (1 + MOST_GROWTH)
        wait_until(lambda: process.memory_info().rss < most, f"memory is as it was: {resident}", TIDIED_SECONDS)
        with Client(server.address) as client:
            wait_until(lambda: client.loads().num_running + client.loads().num_waiting == 0, "nothing runs")
            loads = client.loads()
        assert loads.num_restarts == 0 and loads.kv_usage == 0
