"""Measure the KV cache on disk: a known prefix after a restart, and a sequence of four times the KV memory.

    python benchmarks/kv_disk.py [--shape qwen3-0.6b] [--tokens 2000] [--context 4096] [--turns 5] [--out FILE]

Restart: an engine in its own process computes a prompt and is stopped. Later engines, each in its own process with the
files in the page cache, answer the prompt again with some new tokens appended, and then a prompt that is not in the
cache. The ratio compares the times to first token within one process. The limit is the time to read the files once at
memory bandwidth and to compute the new tokens.

Long: a prompt of `--context` tokens with KV memory for a quarter of it runs in turn with an engine that has memory for
all of it: time to first token, and time between tokens. Then come some more tokens, with the pages of the files dropped
from memory before each (MADV_PAGEOUT), so that a step must read the disk: in turn with and without reading ahead, layer
by layer. Weights and ids are random.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from make_model import make_model
from measured import report
from rich.console import Console

from inferc.compiler.build import compile
from inferc.config import CompileConfig
from inferc.cost.machine import measure_read
from inferc.runtime.artifact.inspect import inspect_artifact
from inferc.runtime.engine.engine import Engine, Outputs
from inferc.runtime.engine.load import load_engine
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.system.resources import available_cores

VOCAB_SIZE, NEW, ANSWER = 4000, 32, 24
COLD_STEPS = 5  # number of steps of each kind, with pages dropped from memory
MADV_PAGEOUT = 21  # a constant of Linux 5.4 and later


def ids(seed: int, count: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(10, VOCAB_SIZE, count).tolist()
    return found


def run(engine: Engine, prompt: list[int], max_tokens: int) -> list[float]:
    """Run a request and return the time of each token, in seconds after the request."""
    engine.add_request("r", prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
    begun = time.perf_counter()
    times: list[float] = []
    while len(times) < max_tokens:
        times += [time.perf_counter() - begun for _ in step(engine)]
    while engine.request_ids:
        step(engine)
    return times


def step(engine: Engine) -> Outputs:
    """Run a step as a server's loop does: if the engine is idle for a while, sleep so that other threads can run."""
    if pause := engine.idle_seconds:
        time.sleep(pause)
    return engine.step()


def restarted(artifact: Path, disk: Path, num_tokens: int, turn: int) -> dict[str, Any]:
    """Measure the known prompt, then one that is not in the cache; runs in its own process."""
    engine = load_engine(artifact, max_num_seqs=4, kv_disk=str(disk))
    run(engine, ids(1000 + turn, 64), 2)  # brings the weights into memory
    known = run(engine, [*ids(0, num_tokens), *ids(2000 + turn, NEW)], 1)[0]
    cached = engine.stats().cached_tokens
    fresh = run(engine, ids(3000 + turn, num_tokens + NEW), 1)[0]
    while engine.has_work:
        step(engine)
    engine.close()
    return {"known_s": known, "fresh_s": fresh, "cached_tokens": cached}


def restart(artifact: Path, disk: Path, num_tokens: int, turns: int) -> dict[str, Any]:
    found = []
    for turn in range(turns + 1):  # in the first turn the cache is empty
        command = [sys.executable, __file__, "--worker", str(artifact), str(disk), str(num_tokens), str(turn)]
        found.append(json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout))
    first, later = found[0], found[1:]
    medians = {name: statistics.median(each[name] for each in later) for name in ("known_s", "fresh_s")}
    return {
        "prompt_tokens": num_tokens,
        "new_tokens": NEW,
        "cached_tokens": later[-1]["cached_tokens"],
        "first_run_s": first["known_s"],
        **medians,
        "fresh_over_known": round(medians["fresh_s"] / medians["known_s"], 2),
        "all": later,
    }


def from_disk(engine: Engine, prompt: list[int]) -> dict[str, Any]:
    """Measure decode steps whose blocks outside the arena are read from the disk, with and without reading ahead."""
    libc = ctypes.CDLL(None, use_errno=True)
    runner: Any = engine.runner
    blocks, count = runner.blocks(0), runner.num_blocks[0]
    address, size = blocks[count:].ctypes.data, blocks[count:].nbytes
    disk: Any = engine.scheduler.offload.manager._mover  # type: ignore[union-attr]
    needed = disk._ahead.is_needed
    times: dict[str, list[float]] = {"ahead": [], "on demand": []}
    faults: dict[str, list[int]] = {"ahead": [], "on demand": []}
    engine.add_request("cold", prompt, SamplingParams(temperature=0.0, max_tokens=2 * COLD_STEPS + 4, ignore_eos=True))
    while not list(engine.step()):
        pass
    engine.step()
    for turn in range(2 * COLD_STEPS):
        name = ("ahead", "on demand")[turn % 2]
        disk._ahead.is_needed = (lambda: True) if name == "ahead" else (lambda: False)
        os.sync()  # written first, because dirty pages would stay in memory
        libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), MADV_PAGEOUT)
        before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_majflt, time.perf_counter()
        engine.step()
        times[name].append(time.perf_counter() - begun)
        faults[name].append(resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before)
    disk._ahead.is_needed = needed
    while engine.request_ids:
        engine.step()
    return {
        "step_s": {name: statistics.median(each) for name, each in times.items()},
        "ahead_over_on_demand": round(statistics.median(times["ahead"]) / statistics.median(times["on demand"]), 3),
        "major_faults": {name: statistics.median(each) for name, each in faults.items()},
        "all_s": times,
    }


def long(artifact: Path, disk: Path, context: int, turns: int, bytes_per_token: int) -> dict[str, Any]:
    sizes: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 256, "pipeline": False}
    room = context + ANSWER + 64
    engines = {
        "memory": load_engine(artifact, kv_memory_bytes=room * bytes_per_token, **sizes),
        "quarter": load_engine(
            artifact,
            kv_memory_bytes=context // 4 * bytes_per_token,
            kv_disk=str(disk),
            kv_disk_bytes=4 * room * bytes_per_token,
            **sizes,
        ),
    }
    for engine in engines.values():
        run(engine, ids(1, 64), 2)
    ttft: dict[str, list[float]] = {name: [] for name in engines}
    tbt: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(turns):
        for name in engines if turn % 2 else reversed(engines):
            times = run(engines[name], ids(10 + turn, context), ANSWER)
            ttft[name].append(times[0])
            tbt[name].append(statistics.median(np.diff(times)))
    stats = engines["quarter"].stats()
    cold = from_disk(engines["quarter"], ids(10 + turns - 1, context))
    for engine in engines.values():
        engine.close()
    return {
        "context": context,
        "memory_tokens": context // 4,
        "blocks_spilled": stats.num_spilled,
        "ttft_s": {name: statistics.median(each) for name, each in ttft.items()},
        "tbt_ms": {name: 1e3 * statistics.median(each) for name, each in tbt.items()},
        "ttft_ratio": round(statistics.median(ttft["quarter"]) / statistics.median(ttft["memory"]), 3),
        "tbt_ratio": round(statistics.median(tbt["quarter"]) / statistics.median(tbt["memory"]), 3),
        "from_disk": cold,
        "all_ttft_s": ttft,
        "all_tbt_s": tbt,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b", help="model shape of make_model.py")
    parser.add_argument("--quantize", default="int8")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of the prompt that is known after a restart")
    parser.add_argument("--context", type=int, default=4096, help="tokens of the long prompt")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        artifact, disk, num_tokens, turn = options.worker
        print(json.dumps(restarted(Path(artifact), Path(disk), int(num_tokens), int(turn))))
        return
    with tempfile.TemporaryDirectory() as folder:
        model, artifact, disk = (Path(folder) / name for name in ("model", "artifact", "disk"))
        make_model(options.shape, model, None, None, "bfloat16", Console(stderr=True))
        length = max(options.tokens, options.context) + 256
        compile(model, artifact, CompileConfig(certify="none", quantize=options.quantize, max_model_len=length))
        bytes_per_token = int(inspect_artifact(artifact).kv_bytes_per_token)
        read = measure_read(available_cores())
        result = {
            "shape": options.shape,
            "quantize": options.quantize,
            "threads": available_cores(),
            "kv_bytes_per_token": bytes_per_token,
            "read_gb_per_s": round(read / 1e9, 1),
            "restart": restart(artifact, disk, options.tokens, options.turns),
            "long": long(artifact, disk, options.context, max(3, options.turns - 2), bytes_per_token),
        }
        result["restart"]["read_limit_s"] = options.tokens * bytes_per_token / read
    report(result, options.out)


if __name__ == "__main__":
    main()
