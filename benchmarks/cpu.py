"""inferc on the CPU beside its peers, in turn in one run: what `make bench` runs.

    python benchmarks/cpu.py [--shape qwen3-0.6b ...] [--turns 3] [--engines inferc vllm ...] [--cases decode ...]

Every engine gets the same random model and runs in a process of its own (peers/worker.py), one after the other, as many
turns as asked for; medians count. The memory's read bandwidth is measured before every turn: a decode step of one request
can be no faster than the bytes it reads over that. Writes benchmarks/results/cpu-SHAPE.json and .png.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomllib
from measured import ROOT, save
from peers.environments import HERE, Peer, peers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from inferc.config import available_cores
from inferc.machine import cpuinfo, measure_read

SHAPES = ("qwen3-0.6b", "llama-3.2-1b")
OURS = ("bfloat16", "int8", "w8a8", "int4")
WIDTHS = {"bfloat16": 16, "bf16": 16, "int8": 8, "w8a8": 8, "Q8_0": 8, "int4": 4, "Q4_0": 4}
# name: (requests, input_len, output_len), which of the worker's numbers counts
CASES = {
    "decode": ((1, 128, 64), "decode"),
    "prefill_512": ((1, 512, 2), "prefill"),
    "prefill_2048": ((1, 2048, 2), "prefill"),
    "requests_8": ((8, 128, 128), "output"),
    "requests_32": ((32, 128, 128), "output"),
}
CRIPPLED = 0.85  # of its row in peers/expected.toml


@dataclass
class Entry:
    """An engine in one of its formats, and what was measured of it, turn by turn."""

    engine: str
    format: str
    peer: Peer | None
    model: Path
    turns: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""

    @property
    def name(self) -> str:
        return f"{self.engine} {self.format}"

    @property
    def width(self) -> int:
        return WIDTHS[self.format]

    def values(self, case: str) -> list[float]:
        return [turn["cases"][case][CASES[case][1]] for turn in self.turns]

    def median(self, case: str) -> float:
        return statistics.median(self.values(case))


def prepared(shape: str, engine: str, format: str, peer: Peer | None, work: Path) -> Path:
    """The model in the engine's own form; made once, and only then under its name."""
    source = work / shape
    if not source.exists():
        partial = source.with_name(source.name + ".partial")
        _run([sys.executable, str(ROOT / "benchmarks/make_model.py"), shape, str(partial)])
        partial.rename(source)
    if engine in ("transformers", "vllm"):
        return source
    out = work / f"{shape}-{engine}-{format}"
    if out.exists():
        return out
    partial = out.with_name(out.name + ".partial")
    if peer is None:
        quantize = [] if format == "bfloat16" else ["--quantize", format]
        inferc = [sys.executable, "-m", "inferc", "compile", str(source), "-o", str(partial), "--max-model-len", "4096"]
        _run([*inferc, "--dtype", "bfloat16", "--certify", "none", *quantize])
    else:
        _run([str(peer.python), str(HERE / "convert.py"), engine, str(source), format, str(partial)])
    partial.rename(out)
    return out


def _run(command: Sequence[str], env: dict[str, str] | None = None) -> str:
    """Standard output; raises RuntimeError with the last line of standard error."""
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=HERE.parent, env={**os.environ, **(env or {})}, check=False
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"status {done.returncode}"]
        raise RuntimeError(lines[-1][:300])
    return done.stdout


def run_once(entry: Entry, cases: Iterable[str], threads: int) -> dict[str, Any]:
    python = entry.peer.python if entry.peer else Path(sys.executable)
    env = {key: value.format(threads=threads) for key, value in entry.peer.env.items()} if entry.peer else {}
    command = [str(python), "-m", "peers.worker", entry.engine, str(entry.model), "--format", entry.format]
    wanted = json.dumps({name: CASES[name][0] for name in cases})
    out = _run([*command, "--threads", str(threads), "--cases", wanted], env)
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def decode_bytes(entry: Entry) -> int:
    """Bytes of weights that a decode step reads: an artifact knows, of a peer the size of its files says."""
    if entry.peer is None:
        from inferc.runtime.artifact import load_artifact
        from inferc.runtime.bench import model_cost

        return model_cost(load_artifact(entry.model)).weights_bytes
    files = [entry.model] if entry.model.is_file() else list(entry.model.glob("*"))
    kinds = {".gguf", ".safetensors", ".bin", ".data"}
    sizes = {file.name: file.stat().st_size for file in files if file.suffix in kinds or entry.engine == "llama_cpp"}
    return sum(size for name, size in sizes.items() if "tokenizer" not in name)


def expected_row(entry: Entry, shape: str) -> dict[str, float]:
    """The row of peers/expected.toml; empty on another class of machine."""
    table = tomllib.loads((HERE / "expected.toml").read_text(encoding="utf-8"))
    machine = table["machine"]
    flags = next((line.split() for line in cpuinfo().splitlines() if line.startswith("flags")), [])
    if available_cores() != machine["cores"] or not set(machine["flags"]) <= set(flags):
        return {}
    row: dict[str, float] = table.get(shape, {}).get(entry.engine, {}).get(entry.format, {})
    return row


def summary(entries: Sequence[Entry], shape: str, cases: Sequence[str], read: float) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for entry in entries:
        row: dict[str, Any] = {"engine": entry.engine, "format": entry.format, "bits": entry.width}
        if entry.error:
            rows.append({**row, "error": entry.error})
            continue
        num_bytes = decode_bytes(entry)
        row["weights_read_bytes"] = num_bytes
        row["load_seconds"] = statistics.median(turn["load_seconds"] for turn in entry.turns)
        row["peak_rss_gb"] = statistics.median(turn["peak_rss_gb"] for turn in entry.turns)
        row["cases"] = {case: {"median": entry.median(case), "all": entry.values(case)} for case in cases}
        if "decode" in cases:
            row["decode_limit"] = read / num_bytes
            row["of_decode_limit"] = entry.median("decode") * num_bytes / read
        below = {case: row["cases"][case]["median"] / value for case, value in expected_row(entry, shape).items()
                 if case in cases and row["cases"][case]["median"] < CRIPPLED * value}  # fmt: skip
        if below:
            row["crippled"] = below
        rows.append(row)
    return {"shape": shape, "read_gb_per_s": read / 1e9, "rows": rows, "ratios": ratios(rows, cases)}


def ratios(rows: Sequence[dict[str, Any]], cases: Sequence[str]) -> list[dict[str, Any]]:
    """Each of our formats, by case, against the best peer of no fewer bits and the best one of any precision."""
    done = [row for row in rows if "cases" in row]
    found = []
    for ours in (row for row in done if row["engine"] == "inferc"):
        for case in cases:
            value = ours["cases"][case]["median"]
            entry: dict[str, Any] = {"format": ours["format"], "case": case, "inferc": value}
            rivals = [row for row in done if row["engine"] != "inferc"]
            equal = [row for row in rivals if row["bits"] == ours["bits"]]
            for name, group in (("same_bits", equal), ("any", rivals)):
                if group:
                    best = max(group, key=lambda row: row["cases"][case]["median"])
                    speed = best["cases"][case]["median"]
                    entry[name] = {"peer": f"{best['engine']} {best['format']}", "value": speed, "ratio": value / speed}
            found.append(entry)
    return found


def show(result: dict[str, Any], cases: Sequence[str], console: Console) -> None:
    table = Table(title=f"{result['shape']}: tokens/s, medians; memory read at {result['read_gb_per_s']:.1f} GB/s")
    for column in ("engine", "format", *cases, "of the decode limit", "load s", "RSS GB"):
        table.add_column(column, justify="left" if column in ("engine", "format") else "right")
    for row in result["rows"]:
        if "error" in row:
            table.add_row(row["engine"], row["format"], "failed")
            continue
        speeds = [f"{row['cases'][case]['median']:.1f}" for case in cases]
        share = f"{row['of_decode_limit']:.0%}" if "of_decode_limit" in row else ""
        rest = (f"{row['load_seconds']:.1f}", f"{row['peak_rss_gb']:.1f}")
        table.add_row(row["engine"], row["format"], *speeds, share, *rest)
    console.print(table)
    if not any(row["engine"] != "inferc" for row in result["rows"]):
        return
    table = Table(title="inferc over the best peer")
    for column in ("format", "case", "of the same width", "ratio", "of any precision", "ratio"):
        table.add_column(column, justify="right" if column == "ratio" else "left")
    for row in result["ratios"]:
        pairs = [row.get(name) for name in ("same_bits", "any")]
        cells = [text for one in pairs for text in ((one["peer"], f"{one['ratio']:.2f}") if one else ("", ""))]
        table.add_row(row["format"], row["case"], *cells)
    console.print(table)


def draw(result: dict[str, Any], cases: Sequence[str], path: Path) -> None:
    """Bars by case, one a row, as shares of the case's best."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in result["rows"] if "cases" in row]
    if not rows:
        return
    figure, axes = plt.subplots(
        1, len(cases), figsize=(3.2 * len(cases), 0.32 * len(rows) + 1.6), sharey=True, squeeze=False
    )
    colors = {16: "#4c78a8", 8: "#f58518", 4: "#54a24b"}
    for axis, case in zip(axes[0], cases, strict=True):
        values = [row["cases"][case]["median"] for row in rows]
        bars = axis.barh(range(len(rows)), values, color=[colors[row["bits"]] for row in rows])
        for bar, row in zip(bars, rows, strict=True):
            bar.set_alpha(1.0 if row["engine"] == "inferc" else 0.5)
        axis.bar_label(
            bars, [f"{value:.0f}" if value >= 100 else f"{value:.1f}" for value in values], padding=2, fontsize=7
        )
        limits = [row["decode_limit"] for row in rows] if case == "decode" else []
        if limits:
            axis.plot(limits, range(len(rows)), "k|", markersize=9, label="the memory's limit")
            axis.legend(fontsize=7, loc="lower right")
        axis.set_title(case.replace("_", " "), fontsize=9)
        axis.set_xlim(0, 1.25 * max(values + limits))
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_yticks(range(len(rows)), [f"{row['engine']} {row['format']}" for row in rows])
    axes[0][0].invert_yaxis()
    figure.suptitle(
        f"{result['shape']}, tokens/s on {available_cores()} cores (blue: 16 bits, orange: 8, green: 4)", fontsize=10
    )
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def compare(shape: str, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """The summary of all turns; the files are written anew after each, so that a run that is cut off leaves something."""
    known = peers()
    entries: list[Entry] = []
    for engine in options.engines:
        peer = None if engine == "inferc" else known[engine]
        for format in OURS if peer is None else peer.formats:
            if options.formats and WIDTHS[format] not in options.formats:
                continue
            console.print(f"{shape}: {engine} {format}", style="dim")
            entry = Entry(engine, format, peer, Path())
            try:
                entry.model = prepared(shape, engine, format, peer, options.work)
            except RuntimeError as error:
                entry.error = str(error)
            entries.append(entry)
    reads: list[float] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(shape, total=options.turns * len(entries))
        for turn in range(options.turns):
            reads.append(measure_read(options.threads))
            for entry in entries:
                progress.update(task, description=f"{shape}, turn {turn + 1}: {entry.name}")
                if not entry.error:
                    try:
                        entry.turns.append(run_once(entry, options.cases, options.threads))
                    except RuntimeError as error:
                        entry.error = str(error)
                progress.advance(task)
            result = summary(entries, shape, options.cases, statistics.median(reads))
            save(result, options.out / f"cpu-{shape}.json")
            draw(result, options.cases, options.out / f"cpu-{shape}.png")
    return result


def main() -> int:
    known = peers()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", dest="shapes", nargs="+", default=SHAPES, help="of benchmarks/make_model.py")
    parser.add_argument("--engines", nargs="+", choices=("inferc", *known), default=("inferc", *known))
    parser.add_argument("--formats", nargs="+", type=int, choices=(16, 8, 4), help="only weights of these widths")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=tuple(CASES))
    parser.add_argument("--turns", type=int, default=3, choices=range(1, 100), metavar="N")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--work", type=Path, default=ROOT / "out/bench", help="where models are kept")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    options = parser.parse_args()
    options.work, options.out = options.work.resolve(), options.out.resolve()
    console = Console(stderr=True)
    missing = [name for name in options.engines if name != "inferc" and not known[name].is_made()]
    if missing:
        parser.error(f"not installed: {', '.join(missing)}; run `make peers`, or name others in --engines")
    options.out.mkdir(parents=True, exist_ok=True)
    failed = False
    for shape in options.shapes:
        result = compare(shape, options, console)
        show(result, options.cases, Console(width=max(Console().width, 130)))
        for row in result["rows"]:
            if "error" in row or "crippled" in row:
                failed = True
                what = row.get("error") or f"below {CRIPPLED} of its row in peers/expected.toml: {row['crippled']}"
                console.print(f"{row['engine']} {row['format']}: {what}", style="red")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
