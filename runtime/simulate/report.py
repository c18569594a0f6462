"""The report of a trace's playback: figures for a table, and plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inferc.errors import ConfigError, InfercError
from inferc.runtime.simulate.simulate import Playback
from inferc.system.atomic_file import atomic_write

LINE_WIDTH = 1.6


@dataclass(frozen=True)
class Summary:
    """The figures of one policy at one load, with times in milliseconds and rates per second of all replicas together.

    goodput_rate: requests per second whose objectives were met; goodput: their share of all requests. hit_rate: the
    share of the prompts' tokens that was found in the prefix cache.
    """

    policy: str
    speed: float
    requests: int
    refused: int
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    tbt_p50: float
    tbt_p99: float
    latency_mean: float
    latency_p50: float
    latency_p99: float
    output_tokens_per_s: float
    goodput: float
    goodput_rate: float
    hit_rate: float
    kv_usage_mean: float
    preemptions_per_1000: float
    length_error: float
    length_error_of_mean: float


def summarize(policy: str, speed: float, played: Playback, ttft_ms: float | None, tbt_ms: float | None) -> Summary:
    """Compute the figures of a playback for these objectives (None: any time is good)."""
    times = played.times
    served = [each for each in times if each.first is not None]
    good = [each for each in times if each.is_good((ttft_ms or np.inf) / 1000, (tbt_ms or np.inf) / 1000)]
    ttft = [each.ttft for each in served] or [0.0]
    latency = [each.latency for each in served] or [0.0]
    gaps = [gap for each in served for gap in each.gaps] or [0.0]
    seconds = max(played.seconds, 1e-9)

    def percentile(values: Sequence[float], q: float) -> float:
        return 1000 * float(np.percentile(values, q))

    return Summary(
        policy=policy,
        speed=speed,
        requests=len(times),
        refused=sum(each.refused for each in times),
        ttft_mean=1000 * float(np.mean(ttft)),
        ttft_p50=percentile(ttft, 50),
        ttft_p99=percentile(ttft, 99),
        tbt_p50=percentile(gaps, 50),
        tbt_p99=percentile(gaps, 99),
        latency_mean=1000 * float(np.mean(latency)),
        latency_p50=percentile(latency, 50),
        latency_p99=percentile(latency, 99),
        output_tokens_per_s=sum(each.num_tokens for each in times) / seconds,
        goodput=len(good) / len(times),
        goodput_rate=len(good) / seconds,
        hit_rate=played.cached_tokens / max(1, played.prompt_tokens),
        kv_usage_mean=float(played.samples[:, 3].mean()),
        preemptions_per_1000=1000 * played.num_preemptions / len(times),
        length_error=played.length_error,
        length_error_of_mean=played.length_error_of_mean,
    )


def as_json(summaries: Sequence[Summary]) -> list[dict[str, Any]]:
    return [asdict(each) for each in summaries]


def plot(path: Path, title: str, runs: Mapping[str, Playback], summaries: Sequence[Summary]) -> None:
    """Plot runs at one load each or, if summaries have several loads, the summaries by load; as PNG, SVG or PDF.

    The file is written completely or not at all. Raises ConfigError for another kind of file, InfercError without
    matplotlib.
    """
    check_plot(path)
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    figure.suptitle(title, fontsize=11)
    if len({each.speed for each in summaries}) > 1:
        _plot_loads(axes.flat, summaries)
    else:
        _plot_runs(axes.flat, runs, summaries)
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25)
    try:
        with atomic_write(path) as partial:
            figure.savefig(partial, dpi=140)
    finally:
        plt.close(figure)


def check_plot(path: Path) -> None:
    """Raise the errors of `plot` before a long run."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot {path}: expected a file named .png, .svg or .pdf")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}")
    try:
        import matplotlib  # noqa: F401 (only whether it is there)
    except ImportError:
        raise InfercError("pictures need matplotlib: pip install 'inferc[plot]', or leave --plot out") from None


def _plot_runs(axes: Any, runs: Mapping[str, Playback], summaries: Sequence[Summary]) -> None:
    first, second, third, fourth = axes
    for name, played in runs.items():
        served = [each for each in played.times if each.first is not None]
        _distribution(first, [1000 * each.ttft for each in served], len(played.times), name)
        _distribution(second, [1000 * each.latency for each in served], len(played.times), name)
        samples = played.samples
        fourth.plot(samples[:, 0], samples[:, 2], label=name, linewidth=LINE_WIDTH)
    first.set(title="Time to first token", xlabel="ms", ylabel="share of requests", xscale="log")
    second.set(title="Time to the last token", xlabel="ms", ylabel="share of requests", xscale="log")
    places = np.arange(len(summaries))
    third.bar(places - 0.2, [100 * each.goodput for each in summaries], 0.38, label="goodput")
    third.bar(places + 0.2, [100 * each.hit_rate for each in summaries], 0.38, label="prefix cache hits")
    third.set(title="Objectives met, prompt tokens found", ylabel="%", ylim=(0, 100))
    third.set_xticks(places, [each.policy for each in summaries], rotation=20)
    fourth.set(title="Waiting", xlabel="s", ylabel="sequences")
    for ax in (first, third, fourth):
        ax.legend(fontsize=8, frameon=False)


def _distribution(ax: Any, values: Sequence[float], total: int, name: str) -> None:
    """Plot the distribution of times over all requests; refused requests have no time."""
    ordered = np.sort(np.maximum(values, 1e-3))
    ax.plot(ordered, np.arange(1, len(ordered) + 1) / total, label=name, linewidth=LINE_WIDTH)


def _plot_loads(axes: Any, summaries: Sequence[Summary]) -> None:
    wanted = (
        ("ttft_p99", "P99 time to first token", "ms", "log"),
        ("tbt_p99", "P99 time between tokens", "ms", "linear"),
        ("goodput_rate", "Goodput", "requests / s", "linear"),
        ("output_tokens_per_s", "Output", "tokens / s", "linear"),
    )
    for ax, (field, title, unit, scale) in zip(axes, wanted, strict=True):
        for policy in dict.fromkeys(each.policy for each in summaries):
            points = sorted((each.speed, getattr(each, field)) for each in summaries if each.policy == policy)
            ax.plot(*zip(*points, strict=True), label=policy, marker="o", markersize=3.5, linewidth=LINE_WIDTH)
        ax.set(title=title, xlabel="times the trace's rate", ylabel=unit, yscale=scale)
    axes[0].legend(fontsize=8, frameon=False)
