"""The results of `make bench`: medians, ratios to the best peers, shares of the limit, and which targets are met."""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.environments import HERE, Peer

from inferc.cost.machine import cpuinfo
from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.measure.bench import ModelCost, model_cost
from inferc.system.resources import available_cores

OURS = ("bfloat16", "int8", "w8a8", "int4", "int4-kv8")
WIDTHS = {"bfloat16": 16, "bf16": 16, "int8": 8, "w8a8": 8, "Q8_0": 8, "int4": 4, "int4-kv8": 4, "Q4_0": 4}
CRIPPLED = 0.85  # share of the speed in peers/expected.toml below which a peer counts as misconfigured
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    requests: int
    input_len: int
    output_len: int
    unit: str  # which of the worker's numbers counts, in tokens per second
    neighbour: bool = False  # whether another process keeps one of the cores busy

    @property
    def context(self) -> int:
        """The number of tokens that a decode step attends to, half-way through the answer."""
        return self.input_len + self.output_len // 2


CASES = {
    "decode": Case(1, 128, 64, "decode"),
    "prefill_512": Case(1, 512, 2, "prefill"),
    "prefill_2048": Case(1, 2048, 2, "prefill"),
    "requests_8": Case(8, 128, 128, "output"),
    "requests_32": Case(32, 128, 128, "output"),
    "neighbour": Case(1, 128, 64, "decode", neighbour=True),
}


@dataclass
class Entry:
    """An engine in one of its formats, with its measurements turn by turn."""

    engine: str
    format: str
    peer: Peer | None
    model: Path
    turns: list[dict[str, Any]] = field(default_factory=list)
    reads: list[float] = field(default_factory=list)  # read bandwidth in bytes per second, before and after each turn
    error: str = ""

    @property
    def name(self) -> str:
        return f"{self.engine} {self.format}"

    @property
    def width(self) -> int:
        return WIDTHS[self.format]

    def values(self, case: str, unit: str = "") -> list[float]:
        return [turn["cases"][case][unit or CASES[case].unit] for turn in self.turns]

    def median(self, case: str, unit: str = "") -> float:
        return statistics.median(self.values(case, unit))


def weights_bytes(entry: Entry) -> int:
    """Return the bytes of weights that a decode step reads, from the artifact or from the size of a peer's files."""
    if entry.peer is None:
        return cost_of(entry).weights_bytes
    files = [entry.model] if entry.model.is_file() else list(entry.model.glob("*"))
    kinds = {".gguf", ".safetensors", ".bin", ".data"}
    sizes = {file.name: file.stat().st_size for file in files if file.suffix in kinds or entry.engine == "llama_cpp"}
    return sum(size for name, size in sizes.items() if "tokenizer" not in name)


def cost_of(entry: Entry) -> ModelCost:
    return model_cost(load_artifact(entry.model))


def expected_row(entry: Entry, shape: str) -> dict[str, float]:
    """Return the engine's row of peers/expected.toml; empty on another class of machine."""
    table = tomllib.loads((HERE / "expected.toml").read_text(encoding="utf-8"))
    machine = table["machine"]
    flags = next((line.split() for line in cpuinfo().splitlines() if line.startswith("flags")), [])
    if available_cores() != machine["cores"] or not set(machine["flags"]) <= set(flags):
        return {}
    row: dict[str, float] = table.get(shape, {}).get(entry.engine, {}).get(entry.format, {})
    return row


def summary(entries: Sequence[Entry], shape: str, cases: Sequence[str]) -> dict[str, Any]:
    rows = [row_of(entry, shape, cases) for entry in entries]
    own = [entry for entry in entries if entry.peer is None and entry.model.exists()]
    usual = next((cost_of(entry) for entry in own if not entry.format.endswith("kv8")), None)
    for entry, row in zip(entries, rows, strict=True):
        cost = cost_of(entry) if entry in own else usual
        if cost is not None and "cases" in row:
            add_limits(row, cost, cases)
    reads = [read for entry in entries for read in entry.reads]
    result = {"shape": shape, "read_gb_per_s": statistics.median(reads) / 1e9 if reads else 0.0, "rows": rows}
    compared = ratios(rows, cases)
    return {**result, "ratios": compared, "targets": targets(rows, compared, shape, cases)}


def row_of(entry: Entry, shape: str, cases: Sequence[str]) -> Row:
    row: Row = {"engine": entry.engine, "format": entry.format, "bits": entry.width}
    if entry.error or not entry.turns:
        return {**row, "error": entry.error or "not run"}
    row["weights_read_bytes"] = weights_bytes(entry)
    row["read_gb_per_s"] = statistics.median(entry.reads) / 1e9
    row["load_seconds"] = statistics.median(turn["load_seconds"] for turn in entry.turns)
    row["peak_rss_gb"] = statistics.median(turn["peak_rss_gb"] for turn in entry.turns)
    row["cases"] = {case: {"median": entry.median(case), "all": entry.values(case)} for case in cases}
    if "requests_8" in cases:
        row["steps_of_8_per_s"] = entry.median("requests_8", "decode")
    below = {case: row["cases"][case]["median"] / value for case, value in expected_row(entry, shape).items()
             if case in cases and row["cases"][case]["median"] < CRIPPLED * value}  # fmt: skip
    return {**row, "crippled": below} if below else row


def add_limits(row: Row, cost: ModelCost, cases: Sequence[str]) -> None:
    """Add the decode limit to a row: the measured bandwidth divided by the bytes of weights, K and V of a step.

    cost: the model cost with the engine's own KV cache; for a peer, with the 16-bit KV cache that all peers have.
    """
    if row["engine"] == "inferc":
        most = max(CASES[case].requests * (CASES[case].input_len + CASES[case].output_len) for case in cases)
        row["kv_gb"] = most * cost.kv_bytes(0) / 1e9
    if "decode" in cases:
        read = row["weights_read_bytes"] + cost.kv_bytes(CASES["decode"].context)
        row["decode_limit"] = 1e9 * row["read_gb_per_s"] / read
        row["of_decode_limit"] = row["cases"]["decode"]["median"] / row["decode_limit"]


def ratios(rows: Sequence[Row], cases: Sequence[str]) -> list[Row]:
    """Compare each inferc format, by case, with the best peer of at least as many bits and the best of any bits."""
    done = [row for row in rows if "cases" in row]
    found = []
    for ours in (row for row in done if row["engine"] == "inferc"):
        for case in cases:
            value = ours["cases"][case]["median"]
            entry: Row = {"format": ours["format"], "case": case, "inferc": value}
            rivals = [row for row in done if row["engine"] != "inferc"]
            equal = [row for row in rivals if row["bits"] == ours["bits"]]
            for name, group in (("same_bits", equal), ("any", rivals)):
                if group:
                    best = max(group, key=lambda row: row["cases"][case]["median"])
                    speed = best["cases"][case]["median"]
                    entry[name] = {"peer": f"{best['engine']} {best['format']}", "value": speed, "ratio": value / speed}
            found.append(entry)
    return found


def targets(rows: Sequence[Row], compared: Sequence[Row], shape: str, cases: Sequence[str]) -> list[Row]:
    """Return the measured rows of targets.toml: the result, the target, and whether the target is met.

    compared: the result of `ratios` for the rows.
    """
    table = tomllib.loads((Path(__file__).parent / "targets.toml").read_text(encoding="utf-8"))
    done = {row["format"]: row for row in rows if row["engine"] == "inferc" and "cases" in row}
    found = [
        row for asked in table["row"] if asked["case"] in cases for row in against_peers(asked, compared, done, shape)
    ]
    return found + own_targets(table["own"], done, cases)


def against_peers(asked: Row, compared: Sequence[Row], done: dict[str, Row], shape: str) -> list[Row]:
    case, formats = asked["case"], [format for format in asked["formats"] if format in done]
    if not formats:
        return []
    best = max(formats, key=lambda format: done[format]["cases"][case]["median"])
    found = []
    peer = next(row for row in compared if row["format"] == best and row["case"] == case).get(asked["against"])
    least = asked["ratio"][shape] if isinstance(asked["ratio"], dict) and shape in asked["ratio"] else asked["ratio"]
    if peer is not None and not isinstance(least, dict):
        found.append(target(asked["work"], best, peer["ratio"], least, f"x {peer['peer']}"))
    if "of_limit" in asked:
        found.append(target(asked["work"], best, done[best]["of_decode_limit"], asked["of_limit"], "of the limit"))
    return found


def own_targets(asked: dict[str, float], done: dict[str, Row], cases: Sequence[str]) -> list[Row]:
    found = []

    def speed(format: str, case: str) -> float:
        return float(done[format]["cases"][case]["median"])

    for format, row in done.items():
        if {"decode", "requests_8"} <= set(cases):
            times = speed(format, "decode") / row["steps_of_8_per_s"]
            found.append(
                target("a step of 8 to one of 1", format, times, asked["step_of_8_to_1"], "x the time", most=True)
            )
        if {"decode", "neighbour"} <= set(cases):
            share = speed(format, "neighbour") / speed(format, "decode")
            found.append(
                target("a neighbour takes a core", format, share, asked["with_a_neighbour"], "of the quiet speed")
            )
        extra = row["peak_rss_gb"] - row["weights_read_bytes"] / 1e9 - row["kv_gb"]
        found.append(target("resident beyond weights, K and V", format, extra, asked["extra_gb"], "GB", most=True))
        found.append(target("load to first token", format, row["load_seconds"], asked["load_seconds"], "s", most=True))
    quantized = [format for format in done if format != "bfloat16"]
    if "bfloat16" in done and "decode" in cases:
        for name, formats in (("int8", ("int8", "w8a8")), ("int4", ("int4",))):
            there = [format for format in formats if format in done]
            if there:
                best = max(there, key=lambda format: speed(format, "decode"))
                ratio = speed(best, "decode") / speed("bfloat16", "decode")
                found.append(target("decode to bfloat16", best, ratio, asked[f"{name}_to_bfloat16"], "x"))
    if "bfloat16" in done and quantized and "requests_32" in cases:
        worst = min(quantized, key=lambda format: speed(format, "requests_32"))
        ratio = speed(worst, "requests_32") / speed("bfloat16", "requests_32")
        found.append(target("32 requests, the slowest scheme to bfloat16", worst, ratio, asked["quantized_at_32"], "x"))
    return found


def target(work: str, format: str, found: float, asked: float, of: str, *, most: bool = False) -> Row:
    met = found <= asked if most else found >= asked
    return {"work": work, "format": format, "found": found, "asked": asked, "most": most, "of": of, "met": met}
