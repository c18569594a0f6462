"""The tables and the plot of the results of ladder.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tables import COLORS, PALE, Grid, picture


def tables(result: dict[str, Any]) -> list[Grid]:
    """Return a table of the rungs, and a table of the KV memory that is held but not used."""
    grid = [
        ["", "at once", "steps", "tokens computed", "output tokens/s", "to the rung before", "expected", "to the first"]
    ]
    for index, row in enumerate(result["rungs"]):
        ratios = [f"{row['over_before']:.2f}", f"{row['expected_over_before']:.2f}"] if index else ["", ""]
        at_once = row.get("seqs_at_once", min(row["max_num_seqs"], result["workload"]["requests"]))
        work = [f"{at_once:.1f}", f"{row['steps']:,}", f"{row['computed_tokens']:,}"]
        speed = f"{row['output_tokens_per_s']:.0f}" if index else f"{row['output_tokens_per_s']:.1f}"
        grid.append([row["name"], *work, speed, *ratios, f"{row['over_first']:.1f}"])
    memory = [["KV memory held and not used", "in blocks", "if each had a range of full length"]]
    for name, prompt, output, whole, unused, reserved in _memory(result):
        lengths = f"{name}: {prompt:.0f} + {output:.0f} tokens on average, full length {whole:,}"
        memory.append([lengths, f"{unused:.2%}", f"{reserved:.1%}"])
    return [grid, memory]


def _memory(result: dict[str, Any]) -> list[tuple[str, float, float, int, float, float]]:
    """Return rows of KV memory use for the burst (with paging) and the trace.

    A row is: name, mean prompt and answer length, full length, unused share in blocks, unused share if reserved.
    """
    paged = next(row for row in result["rungs"] if row["name"] == "+ paging")
    found = [("this burst", result["workload"], result["max_model_len"], paged)]
    if "trace" in result:
        found.append(("conversations", result["trace"], result["trace"]["max_model_len"], result["trace"]))
    return [
        (name, each["mean_prompt"], each["mean_output"], whole, row["kv_unused"], row["kv_unused_if_reserved"])
        for name, each, whole, row in found
    ]


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw bars of the speed of each rung, and of the use of the KV memory."""
    work = result["workload"]
    title = (
        f"{work['requests']} requests at once, {work['mean_prompt']:.0f} + {work['mean_output']:.0f} tokens on average:"
        f" a Llama of {result['parameters'] / 1e6:.0f} M parameters on {result['threads']} cores"
    )
    with picture(path, title, (11, 3.8), columns=2, width_ratios=(2.1, 1)) as axes:
        _draw_speed(result["rungs"], axes[0, 0])
        _draw_memory(result, axes[0, 1])


def _draw_speed(rows: list[dict[str, Any]], axis: Any) -> None:
    speeds = [row["output_tokens_per_s"] for row in rows]
    bars = axis.barh(range(len(rows)), speeds, height=0.68, color=COLORS[0])
    for place, (bar, row) in enumerate(zip(bars, rows, strict=True)):
        bar.set_alpha(0.45 + 0.55 * place / (len(rows) - 1))
        text = f"{speeds[place]:.0f}"
        if place:
            text += f"   ×{row['over_before']:.{2 if row['over_before'] < 10 else 0}f}"
        if place > 1:
            text += f", in all ×{row['over_first']:.0f}"
        axis.annotate(text, (speeds[place], place), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axis.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=9)
    axis.set_xlim(0, 1.42 * max(speeds))
    axis.set_xlabel("output tokens a second", fontsize=9)
    axis.invert_yaxis()
    axis.tick_params(axis="y", length=0)


def _draw_memory(result: dict[str, Any], axis: Any) -> None:
    shares, names = [], []
    for name, *_, unused, reserved in _memory(result):
        names += [f"{name}\nreserved", f"{name}\nin blocks"]
        shares += [reserved, unused]
    places = range(len(shares))
    axis.barh(places, [100 * (1 - share) for share in shares], height=0.6, color=COLORS[2], label="used")
    axis.barh(
        places,
        [100 * share for share in shares],
        0.6,
        [100 * (1 - share) for share in shares],
        color=PALE,
        label="unused",
    )
    for place, share in zip(places, shares, strict=True):
        text = (
            f"{share:.0%} unused" if share > 0.1 else f"{share:.1%} unused" if share > 0.01 else f"{share:.2%} unused"
        )
        axis.annotate(text, (100, place), (5, 0), textcoords="offset points", va="center", fontsize=8)
    axis.set_yticks(places, names, fontsize=8)
    axis.set_xlim(0, 100)
    axis.set_xlabel("KV memory that sequences hold, %", fontsize=9)
    axis.invert_yaxis()
    axis.tick_params(axis="y", length=0)
