"""The tables and the plot of the results of trace_engine.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tables import COLORS, Grid, picture

TIMES = ("ttft_mean", "ttft_p50", "ttft_p99", "tbt_p99")
HEAD = ["", "TTFT mean", "P50", "P99", "TBT P99", "tokens/s as they come", "all at once"]


def tables(result: dict[str, Any]) -> list[Grid]:
    """Return tables of each variant's results, each part's gain with its limit, and the prefix cache hit rates."""
    figures = [[*HEAD, "prefix hits"]]
    for row in result["variants"]:
        times = [f"{row[name]:.0f} ms" for name in TIMES]
        speeds = [f"{row['output_tokens_per_s']:.1f}", f"{row['at_once']:.1f}"]
        figures.append([row["name"], *times, *speeds, f"{row['hit_rate']:.2%}"])
    gains = [["with over without", *HEAD[1:], "its limit", "if steps counted alone"]]
    for row in result["ratios"]:
        own = [f"{row[name]:.2f}" for name in (*TIMES, "output_tokens_per_s", "at_once")]
        limits = [result["limits"].get(row["what"] + suffix) for suffix in ("", ", by steps")]
        gains.append([row["what"], *own, *("" if limit is None else f"{limit:.2f}" for limit in limits)])
    found = result["hits"]
    hits = [
        ["prefix hits, of prompts' tokens", "found", "ideal of this size", "found of it", "ideal without end"],
        [f"{found['kv_tokens']:,} of {found['distinct_tokens']:,} distinct tokens",
         f"{found['measured']:.2%}", f"{found['ideal']:.2%}", f"{found['measured'] / max(found['ideal'], 1e-9):.3f}",
         f"{found['ideal_without_end']:.2%}"],
    ]  # fmt: skip
    return [figures, gains, hits]


def draw(result: dict[str, Any], path: Path) -> None:
    title = (
        f"{result['requests']} conversations, lengths and times divided by {result['scale']}"
        f" ({result['mean_prompt']:.0f} + {result['mean_output']:.0f} tokens on average), at {result['load']:.0%} of"
        f" what the engine serves: a Llama of {result['parameters'] / 1e6:.0f} M parameters on {result['threads']}"
        " cores"
    )
    with picture(path, title, (11.5, 7.2), rows=2, columns=2) as axes:
        _draw_times(result["variants"], "ttft", "Time to first token", axes[0, 0])
        _draw_times(result["variants"], "tbt", "Time between tokens", axes[0, 1])
        _draw_speed(result, axes[1, 0])
        _draw_hits(result["hits"], axes[1, 1])
        axes[0, 0].legend(fontsize=8, frameon=False)


def _draw_times(rows: list[dict[str, Any]], name: str, title: str, axis: Any) -> None:
    for row, color in zip(rows, COLORS, strict=True):
        values = row[f"{name}_percentiles"]
        places = [100 * place / (len(values) - 1) for place in range(len(values))]
        axis.plot(values, places, color=color, label=row["name"], linewidth=1.6)
    axis.set(
        title=title,
        xscale="log",
        xlabel="ms",
        ylabel=f"% of {'requests' if name == 'ttft' else 'tokens'}",
        ylim=(0, 100),
    )
    axis.grid(alpha=0.25)


def _draw_speed(result: dict[str, Any], axis: Any) -> None:
    rows = result["variants"]
    speeds = [row["at_once"] for row in rows]
    axis.barh(range(len(rows)), speeds, height=0.62, color=COLORS)
    for place, speed in enumerate(speeds):
        axis.annotate(f"{speed:.0f}", (speed, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axis.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=9)
    axis.set(title="All at once", xlabel="output tokens a second", xlim=(0, 1.15 * max(speeds)))
    axis.invert_yaxis()
    axis.tick_params(axis="y", length=0)


def _draw_hits(hits: dict[str, Any], axis: Any) -> None:
    rows = hits["by_size"]
    sizes = [row["kv_tokens"] / 1000 for row in rows]
    axis.plot(sizes, [100 * row["ideal"] for row in rows], color="black", linewidth=1.2, label="ideal of the same size")
    axis.plot(
        sizes, [100 * row["simulated"] for row in rows], "o", color=COLORS[0], label="scheduler and cache, simulated"
    )
    axis.plot([hits["kv_tokens"] / 1000], [100 * hits["measured"]], "D", color=COLORS[1], label="engine, measured")
    axis.axhline(100 * hits["ideal_without_end"], color="gray", linewidth=0.8, linestyle=":", label="cache without end")
    axis.set(title="Prefix cache", xlabel="KV cache, thousands of tokens", ylabel="% of prompts' tokens found")
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8, frameon=False)
