"""Measure the cost of a compile: seconds by part for 80 layers, and seconds and peak memory of a whole compile.

    python benchmarks/compile_cost.py [--quantize int8] [--out benchmarks/results/compile_cost.json]

`layers`: capture and lower the shape of Llama-3.1-70B, without writing anything. `whole`: run `inferc compile` for the
shape of Llama-3.1-8B, with the certificate of a random copy of its layers. The weights are zeros in sparse files that
take no disk space; the artifact takes disk space under --work while the benchmark runs. Each case runs in its own
process.

Memory is sampled every 10 ms from /proc, over the process and all processes that it starts (C++ compilers among them).
`anonymous` is memory that the processes allocated; `rss` also counts mapped file pages (mainly torch's libraries),
which the kernel can drop; `max_rss` is the kernel's own count for the largest single process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measured import ROOT, report

from inferc.cost.machine import measure_read
from inferc.system.resources import available_cores

INFERC = (sys.executable, "-m", "inferc")
LAYERS_SHAPE, WHOLE_SHAPE = "llama-3.1-70b", "llama-3.1-8b"
SAMPLE_S = 0.01
GB = 1e9


@dataclass
class Peak:
    """The largest number of bytes seen at once, over a process and its descendants."""

    anonymous: int = 0
    rss: int = 0
    samples: int = field(default=0, repr=False)

    def sample(self, pid: int) -> None:
        counts = [memory_of(each) for each in (pid, *descendants(pid))]
        self.anonymous = max(self.anonymous, sum(anonymous for anonymous, _ in counts))
        self.rss = max(self.rss, sum(rss for _, rss in counts))
        self.samples += 1


def memory_of(pid: int) -> tuple[int, int]:
    """Return the anonymous and all resident bytes of a process; zeros for a process that has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0, 0
    sizes = dict(line.split(":", 1) for line in text.splitlines() if line.startswith(("Rss", "VmRSS")))
    found = {name: 1024 * int(value.split()[0]) for name, value in sizes.items()}
    return found.get("RssAnon", 0) + found.get("RssShmem", 0), found.get("VmRSS", 0)


def descendants(pid: int) -> Iterator[int]:
    try:
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:
        return
    for child in children:
        yield child
        yield from descendants(child)


def measured(command: list[str]) -> tuple[dict[str, Any], dict[str, float]]:
    """Run a command; return the JSON that it prints, and its seconds and peak memory in GB."""
    peak, done = Peak(), threading.Event()
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)

    def watch() -> None:
        while not done.wait(SAMPLE_S):
            peak.sample(process.pid)

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert process.stdout is not None
    with process.stdout as stream:
        output = stream.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed with status {process.returncode}")
    memory = {"anonymous": peak.anonymous, "rss": peak.rss, "max_rss": 1024 * usage.ru_maxrss}
    cost = {"seconds": round(seconds, 2), **{f"{name}_gb": round(value / GB, 2) for name, value in memory.items()}}
    return json.loads(output), cost


def capture_and_lower(folder: str) -> dict[str, float]:
    """Return the seconds of each compile stage up to the C++ source; runs in its own process."""
    times = {}
    start = time.perf_counter()

    def part(name: str) -> None:
        nonlocal start
        now = time.perf_counter()
        times[f"{name}_s"] = round(now - start, 2)
        start = now

    from inferc.backends.lower import LowerConfig, lower
    from inferc.codegen.cpp.emit import emit
    from inferc.frontend.check import check_capture
    from inferc.frontend.checkpoint.load import load
    from inferc.frontend.export import export_model
    from inferc.passes.lower.plan_memory import memory_plan
    from inferc.targets import Target

    part("import")
    checkpoint = load(folder)
    part("load")
    program = export_model(checkpoint, "bfloat16")
    part("capture")
    check_capture(program, checkpoint)
    part("check")
    lower(program, LowerConfig(Target.parse("cpu")))
    part("passes")
    plan = memory_plan(program)
    emit(program, plan.values, plan.arena.pools)
    part("emit")
    return times


def make_model(shape: str, out: Path) -> None:
    script = str(ROOT / "benchmarks/make_model.py")
    subprocess.run([sys.executable, script, shape, str(out), "--sparse"], check=True, stdout=subprocess.DEVNULL)


def compile_whole(model: Path, artifact: Path, quantize: str) -> dict[str, Any]:
    scheme = [] if quantize == "none" else ["--quantize", quantize]
    options = ["--dtype", "bfloat16", "--certify", "layers", "--max-model-len", "8192", "--json"]
    summary, cost = measured([*INFERC, "compile", str(model), "-o", str(artifact), *scheme, *options])
    passes = sum(record["seconds"] for record in summary["passes"])
    return {
        "shape": WHOLE_SHAPE,
        "weights": "bfloat16" if quantize == "none" else quantize,
        "passes_s": round(passes, 2),
        "weights_gb": round(summary["weights_bytes"] / GB, 2),
        **cost,
    }


def can_quantize() -> bool:
    done = subprocess.run([*INFERC, "compile", "--help"], stdout=subprocess.PIPE, text=True, check=True)
    return "--quantize" in done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--quantize", default="int8", help='quantization scheme of the whole compile; "none" for bfloat16'
    )
    parser.add_argument("--case", choices=("layers", "whole"), action="append", help="run only this case")
    parser.add_argument(
        "--work", type=Path, help="folder for the artifact: 17 GB in bfloat16 (the default: the system's)"
    )
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(capture_and_lower(options.worker)))
        return
    if options.quantize != "none" and not can_quantize():
        raise SystemExit("this inferc has no --quantize; give --quantize none, which compiles in bfloat16")
    cases = options.case or ["layers", "whole"]
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.work) as scratch:
        model, artifact = Path(scratch) / "model", Path(scratch) / "artifact"
        if "layers" in cases:
            make_model(LAYERS_SHAPE, model / LAYERS_SHAPE)
            parts, cost = measured([sys.executable, __file__, "--worker", str(model / LAYERS_SHAPE)])
            result["layers"] = {"shape": LAYERS_SHAPE, **parts, **cost}
        if "whole" in cases:
            make_model(WHOLE_SHAPE, model / WHOLE_SHAPE)
            result["whole"] = compile_whole(model / WHOLE_SHAPE, artifact, options.quantize)
    # Measured last, because the max_rss of a child is at least the memory of its parent when the child was started.
    result["read_gb_per_s"] = round(measure_read(available_cores()) / GB, 1)
    report(result, options.out)


if __name__ == "__main__":
    main()
