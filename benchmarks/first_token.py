"""Measure process start to first token: `inferc generate --max-tokens 1`, and `inferc serve` until it is ready.

python benchmarks/first_token.py [--model examples/models/tiny-llama] [--repeats 5] [--out FILE]

Whole processes are timed, from fork to the end (generate) or to the ready line (serve). The result has medians and
every single time. The memory's read bandwidth, measured in the same run, shows how fast the machine was meanwhile.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measured import ROOT, report

from inferc.cost.machine import measure_read
from inferc.system.resources import available_cores

INFERC = (sys.executable, "-m", "inferc")


def first_token(artifact: Path) -> float:
    """Return the seconds of a whole `inferc generate` process that makes one token."""
    command = [*INFERC, "generate", str(artifact), "--prompt", "def add(a, b):", "--max-tokens", "1"]
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def server_ready(artifact: Path) -> float:
    """Return the seconds until `inferc serve` accepts requests."""
    start = time.perf_counter()
    command = [*INFERC, "serve", str(artifact), "--grpc-port", "0", "--http-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        seconds = time.perf_counter() - start
        server.send_signal(signal.SIGTERM)
    if not line.startswith("ready"):
        raise SystemExit(f"the server of {artifact} did not start; run `inferc serve {artifact}` to see why")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", type=Path, default=ROOT / "examples/models/tiny-llama", help="a Hugging Face folder")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        artifact = Path(folder) / "artifact"
        compile_it = [*INFERC, "compile", str(options.model), "-o", str(artifact), "--certify", "none"]
        subprocess.run(compile_it, check=True, stdout=subprocess.DEVNULL)
        first_token(artifact)  # brings the files into the page cache
        times = [(first_token(artifact), server_ready(artifact)) for _ in range(options.repeats)]
    tokens, ready = zip(*times, strict=True)
    result = {
        "model": options.model.name,
        "read_gb_per_s": round(measure_read(available_cores()) / 1e9, 1),
        "first_token_s": {"median": round(statistics.median(tokens), 3), "all": [round(each, 3) for each in tokens]},
        "server_ready_s": {"median": round(statistics.median(ready), 3), "all": [round(each, 3) for each in ready]},
    }
    report(result, options.out)


if __name__ == "__main__":
    main()
