"""Compare `inferc simulate` with the engine itself on the same requests.

python benchmarks/simulated.py OUT TRACE [--scale 16] [--requests 40] [--speed 0.01] [--policy fcfs …] [--kv-tokens N]
    [--ttft-ms MS] [--tbt-ms MS] [--calibrate 30] [--out FILE]

OUT is an artifact. TRACE is a file as for `inferc simulate`, or `mixed`: the requests of policies.py, --speed of them
per second. Step costs are measured right before and after the engine runs, because the speed of a machine varies; the
simulation uses the mean of both. Every policy gets its own engine with an empty cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from policies import mixed, short_latency_p99

from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.engine.load import load_engine
from inferc.runtime.simulate.calibrate import CostFile, measure_cost
from inferc.runtime.simulate.report import Summary, summarize
from inferc.runtime.simulate.simulate import Replica, play
from inferc.runtime.simulate.trace import Trace, read_trace
from inferc.runtime.step.cost import StepCost

COMPARED = (
    "ttft_mean",
    "ttft_p50",
    "ttft_p99",
    "tbt_p50",
    "tbt_p99",
    "latency_mean",
    "output_tokens_per_s",
    "hit_rate",
)


def compare(trace: Trace, policy: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run a policy on the engine and in the simulator; return both summaries and their ratios."""
    artifact = load_artifact(options.artifact)
    sizes: dict[str, Any] = {"max_num_seqs": options.max_num_seqs, "policy": policy}
    if options.kv_tokens is not None:
        sizes["kv_memory_bytes"] = options.kv_tokens * artifact.kv_bytes_per_token
    objectives = options.ttft_ms, options.tbt_ms
    engine = load_engine(artifact, **sizes)
    config = engine.scheduler.config

    def calibrate() -> CostFile:
        return measure_cost(engine, policy, options.calibrate, artifact.kv_bytes_per_token)

    before = calibrate()
    learned = engine.scheduler.forecast.cost  # the cost model that a server has learned after some time
    engine.close()
    engine = load_engine(artifact, **sizes)
    engine.scheduler.forecast.cost = learned
    replica = Replica.real(engine, time.perf_counter, time.sleep)
    played = play([replica], trace, objectives)
    measured = summarize(policy, options.speed, played, *objectives)
    engine.runner = replica.runner.runner
    after = calibrate()
    engine.close()
    cost = StepCost()
    cost.set_prices({name: (price + after.prices[name]) / 2 for name, price in before.prices.items()})
    # The simulated engine gets the same sizes and vocabulary as the real one.
    simulated = Replica.simulated(dataclasses.replace(config), engine.model.vocab_size, cost)
    made_up = play([simulated], trace, objectives)
    predicted = summarize(policy, options.speed, made_up, *objectives)
    return {
        "policy": policy,
        "measured": {**dataclasses.asdict(measured), "short_latency_p99": short_latency_p99(played, trace)},
        "simulated": {**dataclasses.asdict(predicted), "short_latency_p99": short_latency_p99(made_up, trace)},
        "ratios": ratios(measured, predicted),
        "prices_before": before.prices,
        "prices_after": after.prices,
        "cost_error": [before.error, after.error],
    }


def ratios(measured: Summary, predicted: Summary) -> dict[str, float]:
    """Return the ratios of simulated to measured values."""
    found = {}
    for name in COMPARED:
        real, made_up = getattr(measured, name), getattr(predicted, name)
        found[name] = round(made_up / real, 3) if real else float(made_up == real)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("trace", help="a trace file, or: mixed")
    parser.add_argument("--scale", type=int, default=16)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--speed", type=float, default=0.01)
    parser.add_argument("--policy", action="append")
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--kv-tokens", type=int)
    parser.add_argument("--ttft-ms", type=float)
    parser.add_argument("--tbt-ms", type=float, help="objective for the mean time between tokens")
    parser.add_argument("--calibrate", type=float, default=30.0, metavar="SECONDS")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.trace == "mixed":
        trace = mixed(options.requests).faster(options.speed)
    else:
        trace = read_trace(Path(options.trace)).scaled(options.scale).first(options.requests).faster(options.speed)
    print(f"{len(trace.requests)} requests in {trace.seconds:.0f} s")
    rows = [compare(trace, policy, options) for policy in options.policy or ["fcfs"]]
    for row in rows:
        print(row["policy"], "simulated / measured:", json.dumps(row["ratios"]))
        for kind in ("measured", "simulated"):
            shown = (*COMPARED, "short_latency_p99", "goodput", "refused")
            print(f"  {kind:9}", json.dumps({name: round(row[kind][name], 4) for name in shown}))
    if options.out is not None:
        facts = {
            "ttft_ms": options.ttft_ms,
            "tbt_ms": options.tbt_ms,
            "scale": options.scale,
            "speed": options.speed,
            "requests": options.requests,
            "rows": rows,
        }
        options.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
