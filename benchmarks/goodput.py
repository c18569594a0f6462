"""Compare the goodput of inferc's server with that of its peers: the rate that each sustains within the objectives.

    python benchmarks/goodput.py qwen3-0.6b [--engines inferc-bfloat16 vllm-bfloat16 …]
                                 [--ttft 1000] [--tbt 200] [--turns 2] [--out FILE]

A model with random weights in a shape of `make_model.py` is compiled or converted for each engine as in `make bench`,
and served with OpenAI's completions interface: inferc and vLLM have servers; OpenVINO GenAI has none and gets
peers/openvino_server.py. Then, in turn, each server gets the loads of `inferc bench serve`: the same prompts, lengths
and arrival pattern at rates 10 % apart, up or down, until the highest rate is known at which 90 % of the requests have
their first token within --ttft ms and a mean time between tokens within --tbt ms. One server runs at a time; the load
generator shares the machine's cores with it, which is the same for all servers.

    python benchmarks/goodput.py qwen3-0.6b --arrivals burst --engines inferc-w8a8 inferc-w8a8-static

`-static` is inferc with `--policy static`: requests that arrive while a batch runs wait for its end.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import make_model
from cpu import prepared
from measured import ROOT, report
from peers.environments import HERE as PEERS
from peers.environments import peers

from inferc.bench.candidates import highest_good, next_rung
from inferc.bench.endpoints import Target
from inferc.bench.figures import Goals, ServeResult
from inferc.bench.own_server import serving
from inferc.bench.session import Settings, measure
from inferc.bench.workload import PATTERNS, Arrivals, Lengths
from inferc.cost.machine import measure_read
from inferc.system.resources import available_cores

ENGINES = ("inferc-bfloat16", "vllm-bfloat16", "openvino-bfloat16", "inferc-w8a8", "openvino-int8")
STEP, LOWEST_RUNG = 1.1, -30  # ratio of two neighbouring rates, and the rung of the lowest rate (0.06 requests/s)
MOST_LOADS = 8  # largest number of loads in an engine's turn
# A search begins at the share FIRST_SHARE of the rate that ALL_AT_ONCE clients reach in a closed loop.
ALL_AT_ONCE, FIRST_SHARE = 24, 0.7
MAX_SEQS, BUDGET, MAX_MODEL_LEN = 64, 512, 4096  # limits of every server
START_SECONDS = 600.0  # vLLM compiles when it starts
STOP_SECONDS = 60.0
VOCAB_SIZE = 30_000  # prompts use token ids below this; every shape has a larger vocabulary


@dataclass(frozen=True)
class Engine:
    """An engine in one precision; `policy` is the scheduling policy, which only inferc has."""

    name: str
    peer: str
    format: str
    policy: str = "fcfs"

    @staticmethod
    def parse(name: str) -> Engine:
        peer, _, rest = name.partition("-")
        format, _, policy = rest.partition("-")
        if peer not in ("inferc", "vllm", "openvino") or not format or (policy and peer != "inferc"):
            raise ValueError(name)
        return Engine(name, peer, format, policy or "fcfs")


def rate_of(rung: int) -> float:
    return float(STEP**rung)


@contextlib.contextmanager
def server_of(engine: Engine, model: Path, threads: int) -> Iterator[tuple[Target, float]]:
    """Start a server; yield it and the seconds that it took to be ready."""
    start = time.monotonic()
    if engine.peer == "inferc":
        options = ["--policy", engine.policy, "--no-prefix-cache", "--threads", str(threads)]
        options += ["--max-num-seqs", str(MAX_SEQS), "--max-num-batched-tokens", str(BUDGET)]
        with serving(model, options) as addresses:
            # Tokens of a model with random weights often have no text. Such tokens are sent at once only if the request
            # asks for log probabilities.
            yield Target("completions", f"http://{addresses.http}/v1", logprobs=True), time.monotonic() - start
        return
    peer, port = peers()[engine.peer], free_port()
    if engine.peer == "vllm":
        words = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--dtype", engine.format]
        words += ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_SEQS), "--no-enable-prefix-caching"]
        words += ["--host", "127.0.0.1", "--port", str(port), "--disable-log-stats"]
    else:
        words = [str(PEERS / "openvino_server.py"), str(model), "--port", str(port), "--threads", str(threads)]
        words += ["--max-num-seqs", str(MAX_SEQS), "--max-num-batched-tokens", str(BUDGET)]
    env = {**os.environ, **{name: value.format(threads=threads) for name, value in peer.env.items()}}
    env.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # vLLM's server needs its engine in a separate process
    log = Path(os.environ.get("TMPDIR", "/tmp")) / f"goodput-{engine.name}.log"
    with log.open("w") as said:
        process = subprocess.Popen(
            [str(peer.python), *words], stdout=said, stderr=said, env=env, start_new_session=True
        )
        try:
            wait_until_ready(process, port, log)
            yield Target("completions", f"http://127.0.0.1:{port}/v1", vocab_size=VOCAB_SIZE), time.monotonic() - start
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"the server ended before it was ready: see {log}")
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/v1/models")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.2)
    raise SystemExit(f"the server was not ready within {START_SECONDS:.0f} s: see {log}")


def search(target: Target, settings: Settings, first: int | None, turn: int, name: str) -> dict[int, ServeResult]:
    """Run loads until the highest good rung and the lowest bad one are neighbours; return the results by rung."""
    found: dict[int, ServeResult] = {}
    turns = itertools.count(1 + (MOST_LOADS + 1) * turn)
    if first is None:
        closed = replace(
            settings, concurrency=ALL_AT_ONCE, requests=2 * ALL_AT_ONCE, seconds=None, first_turn=next(turns)
        )
        most = run(target, closed).requests_per_s
        first = max(LOWEST_RUNG, round(math.log(FIRST_SHARE * most, STEP)))
        print(
            f"{name:22} turn {turn + 1}: {most:6.2f} requests/s of {ALL_AT_ONCE} clients", file=sys.stderr, flush=True
        )
    while len(found) < MOST_LOADS:
        known = {rung: (each.goodput or 0.0) >= settings.goals.share for rung, each in found.items()}
        if (rung := next_rung(known, first)) is None or rung < LOWEST_RUNG:
            break
        found[rung] = each = run(target, replace(settings, rates=(rate_of(rung),), first_turn=next(turns)))
        ttft, tpot = each.ttft_ms, each.tpot_ms
        print(
            f"{name:22} turn {turn + 1}: {rate_of(rung):6.2f} requests/s, {each.goodput or 0:4.0%} good, TTFT P90"
            f" {ttft.p90 if ttft else 0:6.0f} ms, TPOT P90 {tpot.p90 if tpot else 0:5.0f} ms, {each.failed or ''}",
            file=sys.stderr,
            flush=True,
        )
    return found


def run(target: Target, settings: Settings) -> ServeResult:
    measured = measure(target, settings, lambda stage, done, total: None)
    if measured.is_interrupted:
        raise KeyboardInterrupt
    return measured.results[0]


def compare(options: argparse.Namespace) -> dict[str, Any]:
    engines = [Engine.parse(name) for name in options.engines]
    threads = available_cores()
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    models = {}
    for each in engines:
        peer = None if each.peer == "inferc" else peers()[each.peer]
        if peer is not None and not peer.is_made():
            raise SystemExit(
                f"{each.name}: its environment is not there; run python benchmarks/peers/environments.py {peer.name}"
            )
        models[each.name] = prepared(options.shape, each.peer, each.format, peer, work, MAX_MODEL_LEN)
    settings = Settings(
        Lengths(options.input_len, options.output_len, options.spread, options.spread),
        arrivals=Arrivals(options.arrivals, burst_size=options.burst_size),
        seconds=options.seconds,
        goals=Goals(options.ttft, options.tbt),
    )
    rungs: dict[str, list[int | None]] = {each.name: [] for each in engines}
    loads: dict[str, list[dict[str, Any]]] = {each.name: [] for each in engines}
    ready: dict[str, list[float]] = {each.name: [] for each in engines}
    reads: list[float] = []
    for turn in range(options.turns):
        for each in engines:
            before = [rung for rung in rungs[each.name] if rung is not None]
            first = before[-1] if before else None
            with server_of(each, models[each.name], threads) as (target, seconds):
                found = search(target, settings, first, turn, each.name)
            ready[each.name].append(round(seconds, 2))
            rungs[each.name].append(
                highest_good({rung: (of.goodput or 0.0) >= settings.goals.share for rung, of in found.items()})
            )
            loads[each.name] += [{"turn": turn, **asdict(of)} for of in found.values()]
            reads.append(round(measure_read(threads) / 1e9, 1))
    rows = []
    for each in engines:
        rates = [0.0 if rung is None else round(rate_of(rung), 3) for rung in rungs[each.name]]
        rows.append(
            {
                "engine": each.name,
                "good_requests_per_s": statistics.median(rates),
                "turns": rates,
                "ready_seconds": ready[each.name],
                "loads": loads[each.name],
            }
        )
    return {
        "model": options.shape,
        "objectives": asdict(settings.goals),
        "arrivals": options.arrivals,
        "burst_size": options.burst_size if options.arrivals == "burst" else None,
        "lengths": [options.input_len, options.output_len, options.spread],
        "seconds_of_a_load": options.seconds,
        "threads": threads,
        "rows": rows,
        "ratios": {row["engine"]: ratio(rows[0], row) for row in rows[1:]},
        "read_gb_s": reads,
    }


def ratio(first: dict[str, Any], row: dict[str, Any]) -> float | None:
    """Return the ratio of the first engine's rate to another engine's; None if the other one sustained no rate."""
    other = row["good_requests_per_s"]
    return round(first["good_requests_per_s"] / other, 2) if other else None


def draw(result: dict[str, Any], path: Path) -> None:
    """Plot the share of good requests by rate, with a line for each engine; several turns are averaged."""
    from inferc.bench.plot import saved_figure

    goals = result["objectives"]
    input_len, output_len = result["lengths"][:2]
    title = f"{result['model']}, {result['arrivals']} arrivals: {input_len} tokens in, {output_len} out"
    with saved_figure(path, title, 1, 1, (8.5, 5)) as (ax,):
        for row in result["rows"]:
            by_rate: dict[float, list[float]] = {}
            for load in row["loads"]:
                by_rate.setdefault(load["rate"], []).append(100 * (load["goodput"] or 0.0))
            points = [(rate, statistics.mean(shares)) for rate, shares in sorted(by_rate.items())]
            label = f"{row['engine']}: {row['good_requests_per_s']:.2f} requests/s"
            ax.plot(*zip(*points, strict=True), marker="o", markersize=4, label=label)
        ax.axhline(100 * goals["share"], color="#888888", linestyle="--", linewidth=1)
        within = f"TTFT {goals['ttft_ms']:g} ms and TPOT {goals['tbt_ms']:g} ms"
        ax.set(title=f"Requests within {within}", xlabel="requests / s sent", ylabel="%", ylim=(0, 103), xlim=(0, None))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(make_model.SHAPES), help="shape of the model")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), metavar="PEER-FORMAT")
    parser.add_argument("--arrivals", choices=PATTERNS, default="poisson")
    parser.add_argument("--burst-size", type=int, default=8)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--spread", type=float, default=0.5, help="spread of both lengths, as a share")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of a load")
    parser.add_argument("--ttft", type=float, default=1000.0)
    parser.add_argument("--tbt", type=float, default=200.0)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--work", type=Path, default=ROOT / "out/bench", help="where models are compiled and converted")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    try:
        for name in options.engines:
            Engine.parse(name)
    except ValueError as error:
        parser.error(f"--engines {error}: expected inferc-FORMAT, inferc-FORMAT-POLICY, vllm-FORMAT or openvino-FORMAT")
    result = compare(options)
    for row in result["rows"]:
        print(
            f"{row['engine']:22} {row['good_requests_per_s']:6.2f} requests/s, turns {row['turns']}, ready"
            f" {row['ready_seconds']} s"
        )
    if options.plot is not None:
        draw(result, options.plot)
    report(result, options.out)


if __name__ == "__main__":
    main()
