"""Measure what LoRA adapters cost: tokens per second of a batch, as a ratio to the same model without them, in one run.

    python benchmarks/lora.py BASE ADAPTED [--adapters 16] [--ranks 8,16,64] [--requests 32] [--turns 5] [--out FILE]

BASE and ADAPTED are artifacts of one model, the second compiled with room for the largest rank. Three engines run the
same greedy requests in turn: BASE; ADAPTED with no adapter in the batch, which is what the room alone costs; and
ADAPTED with `--adapters` adapters of random numbers in all layers of attention and MLPs, spread over the requests. The
result is the median of the turns' ratios, for decoding after the first tokens; the first turn warms up. Beside it is
what a step reads more: the bytes of the adapters' matrices over those of the weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from measured import report
from safetensors.numpy import save_file

from inferc.runtime.adapters.arrange import room_for_adapters
from inferc.runtime.artifact.load import Artifact, load_artifact
from inferc.runtime.engine.engine import Engine
from inferc.runtime.engine.load import load_engine
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.system.resources import available_cores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, metavar="BASE", help="an artifact without room for adapters")
    parser.add_argument("adapted", type=Path, metavar="ADAPTED", help="one of the same model, with room")
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--ranks", default="8,16,64")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-len", type=int, default=8)
    parser.add_argument("--output-len", type=int, default=48)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--out", type=Path, help="a JSON file for all numbers")
    options = parser.parse_args()
    ranks = [int(each) for each in options.ranks.split(",")]
    base, adapted = load_artifact(options.base), load_artifact(options.adapted)
    room = room_for_adapters(adapted)
    if room is None or room.rank < max(ranks):
        parser.error(f"{options.adapted} has room for rank {0 if room is None else room.rank}, expected {max(ranks)}")
    config = {"max_num_seqs": options.requests, "num_threads": options.threads}
    plain = load_engine(base, **config)
    found: dict[str, Any] = {
        "artifact": options.base.name,
        "threads": options.threads,
        "turns": options.turns,
        "requests": options.requests,
        "adapters": options.adapters,
        "ranks": {},
    }
    try:
        for rank in ranks:
            with tempfile.TemporaryDirectory() as folder:
                names = [write_adapter(Path(folder), adapted, rank, number) for number in range(options.adapters)]
                engine = load_engine(adapted, **config, adapters=[f"{name}={Path(folder) / name}" for name in names])
            try:
                found["ranks"][str(rank)] = compare(plain, engine, names, options)
                found["ranks"][str(rank)]["bytes_ratio"] = round(bytes_ratio(base, engine, names), 3)
            finally:
                engine.close()
    finally:
        plain.close()
    report(found, options.out)


def write_adapter(folder: Path, artifact: Artifact, rank: int, number: int) -> str:
    """Write an adapter of small random numbers for all layers but the embedding and the head; return its name."""
    room, rng, name = room_for_adapters(artifact), np.random.default_rng(number), f"a{number}"
    assert room is not None
    tensors = {}
    for site in room.sites:
        if site.kind == "linear" and site.layer is not None:
            outputs, inputs = site.stored
            a, b = rng.normal(0, inputs**-0.5, (rank, inputs)), rng.normal(0, 0.02, (outputs, rank))
            tensors[f"base_model.model.{site.module}.lora_A.weight"] = a.astype(np.float32)
            tensors[f"base_model.model.{site.module}.lora_B.weight"] = b.astype(np.float32)
    (folder / name).mkdir()
    save_file(tensors, folder / name / "adapter_model.safetensors")
    facts = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / name / "adapter_config.json").write_text(json.dumps(facts))
    return name


def bytes_ratio(base: Artifact, engine: Engine, names: list[str]) -> float:
    """Return the bytes of all adapters over those of the model's weights."""
    assert engine.adapters is not None
    weights = sum(weight.num_bytes for weight in base.weights)
    return sum(engine.adapters.loaded[name].num_bytes for name in names) / weights


def compare(plain: Engine, adapted: Engine, names: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Measure the three in turn; each gets the same requests."""
    prompts = (
        np.random.default_rng(0).integers(3, plain.model.vocab_size, (options.requests, options.prompt_len)).tolist()
    )
    params = SamplingParams(temperature=0, max_tokens=options.output_len, ignore_eos=True)
    of_request = [replace(params, adapter=names[at % len(names)]) for at in range(options.requests)]
    ways = {"base": (plain, [params] * options.requests), "room": (adapted, [params] * options.requests)}
    ways["adapters"] = (adapted, of_request)
    runs: list[dict[str, float]] = []
    for turn in range(options.turns + 1):
        order = list(ways)[:: 1 if turn % 2 else -1]
        runs.append({way: generate(ways[way][0], prompts, ways[way][1]) for way in order})
    runs = runs[1:]
    found: dict[str, Any] = {
        f"{way}_tokens_per_s": round(statistics.median(run[way] for run in runs), 1) for way in ways
    }
    for way in ("room", "adapters"):
        found[f"{way}_ratio"] = round(statistics.median(run[way] / run["base"] for run in runs), 3)
    return {**found, "runs": [{way: round(value, 1) for way, value in run.items()} for run in runs]}


def generate(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> float:
    """Return the tokens per second after the first tokens."""
    counts = dict.fromkeys(range(len(prompts)), 0)
    for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(index), prompt, each)
    begun, first = 0.0, 0
    while engine.has_work:
        for output in engine.step():
            counts[int(output.request_id)] += len(output.token_ids)
        if not begun and all(counts.values()):
            begun, first = time.perf_counter(), sum(counts.values())
    return (sum(counts.values()) - first) / (time.perf_counter() - begun)


if __name__ == "__main__":
    main()
