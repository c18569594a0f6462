"""Measure TensorRT plans of the shipped models: their sizes, layers and build times; no GPU is needed.

    python benchmarks/tensorrt_build.py [--arch sm_89] [--models tiny-llama …] [--turns 3] [--out FILE]

Each model is built as a whole step (`tensorrt`) and as segments between inferc's own kernels (`tensorrt-paged`), in
bfloat16 and with every quantization scheme that these targets support. Times are those of the whole `inferc compile
--certify none`, medians of `--turns` compiles in turn; the memory's read bandwidth is measured before and after.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from measured import ROOT, save

from inferc.compiler.build import compile
from inferc.config import CompileConfig
from inferc.cost.machine import measure_read
from inferc.runtime.artifact.inspect import inspect_artifact
from inferc.system.resources import available_cores
from inferc.targets import find_spec

TARGETS = ("tensorrt", "tensorrt-paged")
MODELS = ("tiny-llama", "tiny-moe", "tiny-draft")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="sm_89")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "tensorrt-build.json")
    options = parser.parse_args()
    reads = [measure_read(available_cores()) / 1e9]
    seconds: dict[tuple[str, str, str | None], list[float]] = defaultdict(list)
    rows: dict[tuple[str, str, str | None], dict[str, Any]] = {}
    for turn in range(options.turns):
        for model in options.models:
            for target in TARGETS:
                for scheme in (None, *find_spec("tensorrt").schemes):
                    case = (model, target, scheme)
                    rows[case], taken = built(model, f"{target}:{options.arch}", scheme)
                    seconds[case].append(taken)
        print(f"turn {turn + 1} of {options.turns}", flush=True)
    reads.append(measure_read(available_cores()) / 1e9)
    print("| model | target | weights | plans | their bytes | beside them | layers | compiled in |")
    print("|---|---|---|---|---|---|---|---|")
    for case, row in rows.items():
        row["seconds"] = seconds[case]
        print(
            f"| {row['model']} | {row['target'].partition(':')[0]} | {row['scheme']} | {row['num_plans']} |"
            f" {row['plan_bytes'] / 1e6:.1f} MB | {row['weights_bytes'] / 1e6:.1f} MB | {sum(row['layers'].values())} |"
            f" {statistics.median(row['seconds']):.1f} s |"
        )
    print(f"memory read: {reads[0]:.1f} and {reads[1]:.1f} GB/s")
    save({"rows": [*rows.values()], "read_gb_s": reads}, options.out)


def built(model: str, target: str, scheme: Any) -> tuple[dict[str, Any], float]:
    """Compile a model; return the facts about its plans and the seconds; `layers` counts all plans' layers by kind."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        config = CompileConfig(target=target, dtype="bfloat16", quantize=scheme, certify="none")
        start = time.perf_counter()
        compile(ROOT / "examples" / "models" / model, out, config)
        taken = time.perf_counter() - start
        of_plans = inspect_artifact(out).tensorrt
        assert of_plans is not None, "the artifact is for TensorRT"
        plans, whole = of_plans.plans or [], (of_plans.plan_bytes or 0, of_plans.layers or {})
        sizes = [(each.plan_bytes, each.layers) for each in plans] or [whole]
        layers: dict[str, int] = defaultdict(int)
        for _, kinds in sizes:
            for kind, count in kinds.items():
                layers[kind] += count
        row = {
            "model": model,
            "target": target,
            "scheme": scheme or "bfloat16",
            "package": f"{of_plans.package} {of_plans.version}",
            "num_plans": len(sizes),
            "plan_bytes": sum(num_bytes for num_bytes, _ in sizes),
            "weights_bytes": sum(path.stat().st_size for path in out.glob("*.safetensors")),
            "layers": dict(layers),
        }
    return row, taken


if __name__ == "__main__":
    main()
