"""Run many streams for a while, with or without attacks; measure health check latency and the server's growth.

python benchmarks/server_soak.py [--streams 1000] [--seconds 75] [--attacks] [--artifact OUT] [--json] [--out FILE]

A server of tiny-llama, whose chat template contains two traps, streams completions of 100 tokens, `--streams` at a
time; when one ends the next one starts. Another process sends health checks fifty times per second. With `--attacks`,
the attacks of server_attacks.py run meanwhile, one after the other, and clients that leave in the middle of a stream.
The program prints tokens per second, failures, latencies of health checks (in milliseconds), and for each process of
the server its memory, open files and threads: the maximum in the second third of the time, and in the last third.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any

import psutil
from health_probe import HealthProbe
from measured import save
from server_attacks import ATTACKS, Attacked, Target, make_artifact

from inferc.bench import endpoints
from inferc.bench.session import Settings, measure
from inferc.bench.workload import Lengths

PROMPT_LEN, OUTPUT_LEN = 8, 100
WATCH_SECONDS = 2.0
FIGURES = ("memory_mb", "open_files", "threads")
# The processes beside the server's, by the module that each one runs.
ROLES = {"inferc.runtime.engine.process": "engine_process", "inferc.runtime.text.template_worker": "template_worker"}
# Attacks that occupy every connection are left out, because they are meant to keep other clients out, such as the
# streams.
AMONG_STREAMS = [name for name in ATTACKS if name not in ("nothing", "idle connections", "bodies without end")]


class Watch(threading.Thread):
    """A thread that samples memory, open files and threads of a server and its child processes every two seconds."""

    def __init__(self, pid: int, over: threading.Event) -> None:
        super().__init__(daemon=True)
        self._server, self._over = psutil.Process(pid), over
        self.seen: list[dict[str, tuple[float, int, int]]] = []

    def run(self) -> None:
        while not self._over.wait(WATCH_SECONDS):
            seen = {}
            for process in (self._server, *self._server.children(recursive=True)):
                with suppress(psutil.Error):  # the process may have just ended
                    memory = process.memory_info().rss / 1e6
                    seen[_role(process)] = (memory, process.num_fds(), process.num_threads())
            self.seen.append(seen)

    def figures(self) -> dict[str, dict[str, list[float]]]:
        """Return the maximum memory, files and threads of each process in the second and in the last third of time."""
        third = max(1, len(self.seen) // 3)
        parts = self.seen[third : 2 * third], self.seen[2 * third :]
        found: dict[str, dict[str, list[float]]] = {}
        for role in sorted({role for seen in self.seen for role in seen}):
            rows = [[seen[role] for seen in part if role in seen] or [(0.0, 0, 0)] for part in parts]
            found[role] = {
                name: [round(float(max(row[index] for row in part)), 1) for part in rows]
                for index, name in enumerate(FIGURES)
            }
        return found


def _role(process: psutil.Process) -> str:
    words = " ".join(process.cmdline())
    return next((role for module, role in ROLES.items() if module in words), "server")


class Attacker(threading.Thread):
    """A thread that runs one attack after the other until the test is over.

    answered: how often each attack got which answers.
    """

    def __init__(self, target: Target, over: threading.Event) -> None:
        super().__init__(daemon=True)
        self._target, self._over = target, over
        self.answered: dict[str, Counter[str]] = {}

    def run(self) -> None:
        for name in self._names():
            answer = _leave(self._target) if name == "clients that leave" else ATTACKS[name](self._target)
            self.answered.setdefault(name, Counter())[answer] += 1

    def _names(self) -> Iterator[str]:
        for name in cycle(("clients that leave", *AMONG_STREAMS)):
            if self._over.wait(0.1):
                return
            yield name


def _leave(target: Target) -> str:
    """Attack with twenty streams whose clients close the connection after the first bytes."""
    body = json.dumps({"prompt": "abc", "max_tokens": 500, "ignore_eos": True, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    connections = []
    for _ in range(20):
        connections.append(target.connect(target.http))
        connections[-1].sendall(head.encode() + body)
    for connection in connections:
        with suppress(OSError):
            connection.recv(64)
        connection.close()
    return "left"


def run(artifact: Path, streams: int, seconds: float, attacks: bool) -> dict[str, Any]:
    """Run the streams, with or without attacks, and return the report."""
    over = threading.Event()
    room = ("--max-num-seqs", str(min(256, streams)), "--max-num-batched-tokens", "1024")
    with Attacked(artifact, *room) as server:
        watch, attacker = Watch(server.process.pid, over), Attacker(server.target, over)
        watch.start()
        if attacks:
            attacker.start()
        target = endpoints.Target("completions", f"http://{server.target.http}/v1")
        settings = Settings(
            Lengths(PROMPT_LEN, OUTPUT_LEN), concurrency=streams, seconds=seconds, warmup=min(streams, 64)
        )
        began = time.monotonic()
        with HealthProbe(server.target.http, server.target.grpc) as probe:
            (result,) = measure(target, settings, _progress(began)).results
        over.set()
        for thread in (watch, *([attacker] if attacks else [])):
            thread.join()
    return {
        "streams": streams,
        "seconds": round(time.monotonic() - began, 1),
        "completed": result.completed,
        "failed": dict(result.failed),
        "output_tokens_per_second": round(result.completed * OUTPUT_LEN / seconds),
        "health_ms": probe.waits,
        "load_average": round(os.getloadavg()[0], 1),
        "grew": watch.figures(),
        "attacks": {name: dict(answers) for name, answers in attacker.answered.items()},
        "tracebacks": server.log.count("Traceback"),
        "exit_code": server.process.returncode,
    }


def _progress(began: float) -> Any:
    said = began

    def tell(stage: str, done: int, total: int) -> None:
        nonlocal said
        if time.monotonic() - said >= 10:
            said = time.monotonic()
            print(f"{said - began:5.0f} s: {stage} {done}", file=sys.stderr, flush=True)

    return tell


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--artifact", type=Path, help="serve this artifact instead of tiny-llama with traps")
    parser.add_argument("--streams", type=int, default=1000, metavar="N")
    parser.add_argument("--seconds", type=float, default=75.0, metavar="S")
    parser.add_argument("--attacks", action="store_true", help="run attacks besides the streams")
    parser.add_argument("--json", action="store_true", help="print the JSON on one line")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = run(options.artifact or make_artifact(Path(folder)), options.streams, options.seconds, options.attacks)
    print(json.dumps(result, indent=None if options.json else 1))
    if options.out is not None:
        save(result, options.out)


if __name__ == "__main__":
    main()
