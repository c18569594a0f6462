"""Measure how the CPU target scales: decode with the context, prefill with the prompt, the arena with a step's tokens.

    python benchmarks/scaling.py [--lengths 128 512 2048 8192 32768] [--formats bfloat16 bfloat16-kv8] [--turns 3]
                                 [--out FOLDER]

It runs some layers of a real shape with random weights and one request. A decode step must read its weights and the K
and V of the context, so its time must grow by no more than those bytes take. Prefill has a part that is linear in the
prompt (the products) and one that is quadratic (attention). Every length runs once per turn, the formats in turn, and
medians count. The size of the arena comes from the artifact's memory plan. The files scaling.json and scaling.png go
into the folder.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from cpu import prepared
from measured import ROOT, save
from peers.engines.inferc_engine import Inferc
from peers.worker import run_once
from rich.progress import Progress
from tables import COLORS, picture

from inferc.cost.machine import measure_read
from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.engine.load import load_engine
from inferc.runtime.measure.bench import model_cost
from inferc.system.resources import available_cores

NEW_TOKENS = 24
ARENA_TOKENS = (64, 256, 512, 1024, 2048, 4096, 8192)


def model_folder(shape: str, layers: int, work: Path) -> str:
    """Make the model under `work` if it does not exist, and return its name."""
    name = f"{shape}-{layers}layers"
    if not (work / name).exists():
        partial = work / f"{name}.partial"
        script = [sys.executable, str(ROOT / "benchmarks/make_model.py"), shape, str(partial), "--layers", str(layers)]
        subprocess.run(script, check=True, stdout=subprocess.DEVNULL)
        partial.rename(work / name)
    return name


def open_engine(path: Path, threads: int, longest: int) -> Inferc:
    cost = model_cost(load_artifact(path))
    room = cost.kv_bytes(longest + NEW_TOKENS) + (64 << 20)
    return Inferc(load_engine(path, num_threads=threads, max_num_seqs=1, kv_memory_bytes=room, prefix_cache=False))


def measure(paths: dict[str, Path], lengths: Sequence[int], turns: int, threads: int) -> dict[str, Any]:
    """Measure prefill and a decode step for each format and length, in seconds; the rows hold every turn in order."""
    engines = {name: open_engine(path, threads, max(lengths)) for name, path in paths.items()}
    runs: dict[str, dict[int, list[dict[str, float]]]] = {name: {length: [] for length in lengths} for name in paths}
    reads: list[float] = []
    for engine in engines.values():
        run_once(engine, 0, 1, min(lengths), 4)
    with Progress() as progress:
        task = progress.add_task("measuring", total=turns * len(lengths) * len(paths))
        for turn in range(turns):
            reads.append(measure_read(threads))
            for length in lengths:
                for name, engine in engines.items():
                    speeds = run_once(engine, turn, 1, length, NEW_TOKENS)
                    seconds = {"prefill_s": length / speeds["prefill"], "decode_s": 1 / speeds["decode"]}
                    runs[name][length].append(seconds)
                    progress.advance(task)
    read = statistics.median(reads)
    rows = []
    for name, path in paths.items():
        cost = model_cost(load_artifact(path))
        for length in lengths:
            medians = {
                key: statistics.median(run[key] for run in runs[name][length]) for key in ("prefill_s", "decode_s")
            }
            num_bytes = cost.weights_bytes + cost.kv_bytes(length + NEW_TOKENS // 2)
            rows.append({"format": name, "length": length, **medians, "decode_bytes": num_bytes,
                         "limit_s": num_bytes / read, "runs": runs[name][length]})  # fmt: skip
    return {"threads": threads, "read_gb_per_s": [each / 1e9 for each in reads], "rows": rows}


def arena(path: Path, threads: int) -> list[dict[str, int]]:
    memory = load_artifact(path).memory
    return [{"tokens": count, "bytes": memory.arena_bytes(count, 64, 64, threads)} for count in ARENA_TOKENS]


def line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Fit a line by least squares of the relative errors; return its value at 0 and its slope."""
    weights = 1 / np.asarray(y)
    slope, start = np.polyfit(np.asarray(x), np.asarray(y), 1, w=weights)
    return float(start), float(slope)


def fits(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Fit decode time by context length for each format: base, and slope beside the limit by a token's bytes."""
    found = []
    for name in dict.fromkeys(row["format"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["format"] == name]
        lengths = [row["length"] for row in rows]
        start, slope = line(lengths, [row["decode_s"] for row in rows])
        least = (rows[-1]["limit_s"] - rows[0]["limit_s"]) / max(1, lengths[-1] - lengths[0])
        off = max(abs(start + slope * row["length"] - row["decode_s"]) / row["decode_s"] for row in rows)
        found.append({"format": name, "decode_s": start, "decode_s_per_token": slope, "limit_s_per_token": least,
                      "largest_error": off})  # fmt: skip
    return found


def draw(result: dict[str, Any], path: Path) -> None:
    title = f"{result['shape']}, {result['layers']} layers, {result['threads']} threads"
    with picture(path, title, (13, 4), columns=3) as axes:
        _draw(result, *axes[0])


def _draw(result: dict[str, Any], decode: Any, prefill: Any, room: Any) -> None:
    names = list(dict.fromkeys(row["format"] for row in result["rows"]))
    for name, color in zip(names, COLORS, strict=False):
        rows = [row for row in result["rows"] if row["format"] == name]
        lengths = [row["length"] for row in rows]
        decode.plot(lengths, [1e3 * row["decode_s"] for row in rows], "o-", color=color, label=name)
        decode.plot(lengths, [1e3 * row["limit_s"] for row in rows], ":", color=color, label="its bytes' time")
        prefill.plot(lengths, [1e6 * row["prefill_s"] / row["length"] for row in rows], "o-", color=color, label=name)
    decode.set(title="a decode step", xlabel="context, tokens", ylabel="ms")
    prefill.set(title="prefill, by token", xlabel="prompt, tokens", ylabel="µs a token")
    room.plot([row["tokens"] for row in result["arena"]], [row["bytes"] / 2**20 for row in result["arena"]], "o-k")
    room.set(title="arena", xlabel="tokens of a step", ylabel="MiB")
    for axis in (decode, prefill, room):
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
    decode.legend(fontsize=8)
    prefill.legend(fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b", help="model shape of benchmarks/make_model.py")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048, 8192, 32768])
    parser.add_argument("--formats", nargs="+", default=["bfloat16", "bfloat16-kv8"])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--work", type=Path, default=ROOT / "out/bench", help="folder where models are kept")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder for the results")
    options = parser.parse_args()
    if options.turns < 1 or min(options.lengths) < 1:
        parser.error("expected at least one turn and lengths of at least one token")
    work, lengths = options.work.resolve(), sorted(options.lengths)
    work.mkdir(parents=True, exist_ok=True)
    name = model_folder(options.shape, options.layers, work)
    longest = max(lengths) + NEW_TOKENS
    paths = {format: prepared(name, "inferc", format, None, work, longest) for format in options.formats}
    result = measure(paths, lengths, options.turns, options.threads)
    result |= {
        "shape": options.shape,
        "layers": options.layers,
        "arena": arena(paths[options.formats[0]], options.threads),
    }
    result["fits"] = fits(result)
    for row in result["rows"]:
        print(
            f"{row['format']:14} {row['length']:6} tokens: prefill {row['prefill_s']:8.3f} s, a decode step"
            f" {1e3 * row['decode_s']:7.2f} ms, {row['limit_s'] / row['decode_s']:.2f} of the limit"
        )
    for row in result["fits"]:
        print(
            f"{row['format']:14} decode: {1e3 * row['decode_s']:.2f} ms + {1e9 * row['decode_s_per_token']:.1f} ns a"
            f" token of context (its bytes {1e9 * row['limit_s_per_token']:.1f}), at most {row['largest_error']:.0%}"
            " off"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    save(result, options.out / "scaling.json")
    draw(result, options.out / "scaling.png")


if __name__ == "__main__":
    main()
