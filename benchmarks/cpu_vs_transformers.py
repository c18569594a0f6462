"""inferc on the CPU against Hugging Face `generate`, interleaved in one run, as ratios.

    python benchmarks/cpu_vs_transformers.py --shape qwen3-0.6b --out benchmarks/results/cpu_vs_transformers.json

Makes a random-weight folder of the shape (once, under --work), compiles it in bfloat16, then runs each side in a
process of its own, `--repeats` times in turn, and reports medians with the memory read bandwidth of the same run:
decode at batch 1 cannot go faster than that bandwidth over the bytes of the weights. Within a process both sides are
measured alike: the same lengths, the same run to warm up, the same number of runs or requests that count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from measured import ROOT, save

from inferc.machine import measure_read

CASES = {  # name: (input_len, output_len, concurrency)
    "batch 1": (128, 64, 1),
    "prefill 512": (512, 16, 1),
    "8 requests": (128, 128, 8),
}
ROUNDS = 4  # requests of a case with several at once, by its concurrency


def json_of(command: list[str]) -> dict[str, float]:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def inferc_run(artifact: Path, case: tuple[int, int, int], threads: int) -> dict[str, float]:
    input_len, output_len, concurrency = case
    lengths = ["--input-len", str(input_len), "--output-len", str(output_len), "--threads", str(threads), "--json"]
    base = [str(Path(sys.executable).parent / "inferc"), "bench"]
    if concurrency == 1:
        return json_of([*base, "latency", str(artifact), *lengths])
    load = ["--concurrency", str(concurrency), "--requests", str(ROUNDS * concurrency)]
    return json_of([*base, "throughput", str(artifact), *lengths, *load])


def transformers_run(model: Path, case: tuple[int, int, int], threads: int) -> dict[str, float]:
    input_len, output_len, concurrency = case
    worker = ROOT / "benchmarks/peers/transformers_worker.py"
    options = {"--input-len": input_len, "--output-len": output_len, "--concurrency": concurrency, "--threads": threads}
    options["--requests"] = ROUNDS * concurrency
    return json_of([sys.executable, str(worker), str(model), *(str(word) for pair in options.items() for word in pair)])


def prepare(shape: str, work: Path) -> tuple[Path, Path]:
    model, artifact = work / shape, work / f"{shape}-cpu"
    if not model.exists():
        subprocess.run([sys.executable, "benchmarks/make_model.py", shape, str(model)], check=True, cwd=ROOT)
    inferc = str(Path(sys.executable).parent / "inferc")
    subprocess.run([inferc, "compile", str(model), "-o", str(artifact), "--certify", "none"], check=True, cwd=ROOT)
    return model, artifact


def compare(model: Path, artifact: Path, repeats: int, threads: int) -> dict[str, object]:
    metrics = {
        "batch 1": "decode_tokens_per_s",
        "prefill 512": "prefill_tokens_per_s",
        "8 requests": "output_tokens_per_s",
    }
    rows: dict[str, object] = {}
    for name, case in CASES.items():
        ours, theirs = [], []
        for _ in range(repeats):
            ours.append(inferc_run(artifact, case, threads)[metrics[name]])
            theirs.append(transformers_run(model, case, threads)[metrics[name]])
        row = {
            "metric": metrics[name],
            "input_len": case[0],
            "output_len": case[1],
            "concurrency": case[2],
            "inferc": statistics.median(ours),
            "transformers": statistics.median(theirs),
            "ratio": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
            "runs": {"inferc": ours, "transformers": theirs},
        }
        rows[name] = row
        print(f"{name:12s} {metrics[name]:22s} inferc {row['inferc']:8.1f}  transformers {row['transformers']:8.1f}"
              f"  ratio {row['ratio']:.2f}", flush=True)  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b", help="a shape of benchmarks/make_model.py")
    parser.add_argument("--work", type=Path, default=Path("out/bench"), help="where models and artifacts are kept")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    model, artifact = prepare(args.shape, args.work)
    before = measure_read(args.threads) / 1e9
    rows = compare(model, artifact, args.repeats, args.threads)
    after = measure_read(args.threads) / 1e9
    weight_bytes = sum(file.stat().st_size for file in artifact.glob("weights-*.safetensors"))
    limit = (before + after) / 2 * 1e9 / weight_bytes
    result = {
        "shape": args.shape,
        "dtype": "bfloat16",
        "threads": args.threads,
        "read_gb_per_s": {"before": before, "after": after},
        "weight_bytes": weight_bytes,
        "decode_limit_tokens_per_s": limit,
        "cases": rows,
    }
    print(f"read bandwidth {before:.1f} / {after:.1f} GB/s: batch 1 decode can reach {limit:.1f} tokens/s")
    if args.out:
        save(result, args.out)


if __name__ == "__main__":
    main()
