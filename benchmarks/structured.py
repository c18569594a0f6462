"""Measure what holding answers to a form costs: the host's time for masks, and the speed of a whole batch of them.

    python benchmarks/structured.py OUT [--backend auto] [--requests 32] [--input-len 64] [--output-len 64] [--turns 7]
                                    [--threads N] [--steps 4000] [--out FILE]

Three things are measured. *Masks*: for each of a few forms, the time that one sequence takes for one token (to accept
it, and to make the next mask), over random walks through its grammar on one thread. *Rows*: the thread's own time of a
mask where those of `--requests` sequences are made one by one, and in one call, in turn. *Steps*: an engine decodes
`--requests` sequences, in turn without a form and each in an endless JSON array of objects; the result is the median
seconds per step of each, and the median of the turns' ratios; the first turn warms up.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from measured import report

from inferc.arena import mask_words
from inferc.runtime.artifact.load import Artifact, load_artifact
from inferc.runtime.engine.engine import Engine
from inferc.runtime.engine.load import load_engine, model_limits
from inferc.runtime.grammar.backend import Backend, open_backend
from inferc.runtime.grammar.vocabulary import Vocabulary
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.step.structured_outputs import StructuredOutputs
from inferc.runtime.text.tokenizer import Text
from inferc.system.resources import available_cores

PERSON = """{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0,
"maximum": 130}, "mail": {"type": "string", "format": "email"}, "tags": {"type": "array", "items": {"type": "string"}},
"kind": {"enum": ["small", "medium", "large"]}}, "required": ["name", "age", "kind"]}"""
FORMS = {
    "schema": StructuredOutputs(json=PERSON),
    "json": StructuredOutputs(json_object=True),
    "regex": StructuredOutputs(regex=r"(\d{4}-\d{2}-\d{2}: [A-Za-z ,.]+\n)+"),
    "choice": StructuredOutputs(choice=tuple(f"answer number {number}" for number in range(200))),
}
ENDLESS = StructuredOutputs(json=f'{{"type": "array", "items": {PERSON}, "minItems": 4000}}')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path, metavar="OUT", help="a folder that `inferc compile` wrote")
    parser.add_argument("--backend", choices=("auto", "xgrammar", "llguidance"), default="auto")
    parser.add_argument("--requests", type=int, default=32, help="number of concurrent requests")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--steps", type=int, default=4000, help="number of tokens of each form's walks")
    parser.add_argument("--out", type=Path, help="a JSON file for all numbers")
    options = parser.parse_args()
    if options.turns < 1 or options.requests < 1 or options.output_len < 4:
        parser.error("expected at least one turn, one request and four new tokens")
    artifact = load_artifact(options.artifact)
    ends = model_limits(artifact).eos_token_ids
    backend = open_backend(Vocabulary.of(Text(artifact.tokenizer), artifact.vocab_size, ends), options.backend)
    masks = {name: walk(artifact, backend, form, options.steps) for name, form in FORMS.items()}
    rows = {name: rows_of(artifact, backend, form, options.requests) for name, form in FORMS.items()}
    lengths = (options.input_len, options.output_len)
    engine = load_engine(
        artifact,
        structured_outputs_backend=options.backend,
        max_num_seqs=options.requests,
        num_threads=options.threads,
        prefix_cache=False,
    )
    steps = compare(engine, artifact.vocab_size, options.requests, lengths, options.turns)
    found = {"artifact": options.artifact.name, "vocab_size": artifact.vocab_size, "masks": masks, "rows": rows}
    report({**found, "threads": options.threads, **steps}, options.out)


def rows_of(artifact: Artifact, backend: Backend, form: StructuredOutputs, count: int) -> dict[str, float]:
    """Measure the microseconds of a mask among those of many sequences, each at a place of its own in one grammar."""
    grammar, random = backend.load(backend.compile(form)), np.random.default_rng(0)
    bits = np.zeros((count, mask_words(artifact.vocab_size)), np.uint32)
    matchers = [grammar.matcher() for _ in range(count)]
    spent: dict[str, list[float]] = {"one_by_one_us": [], "together_us": []}
    for step in range(100):
        for name in sorted(spent, reverse=step % 2 == 0):
            begun = time.thread_time()
            if name == "together_us":
                matchers[0].fill_rows(matchers, bits, range(count))
            else:
                for row, matcher in enumerate(matchers):
                    matcher.fill(bits, row)
            spent[name].append(1e6 * (time.thread_time() - begun) / count)
        for row, matcher in enumerate(matchers):
            allowed = np.flatnonzero(np.unpackbits(bits[row].view(np.uint8), bitorder="little")[: artifact.vocab_size])
            assert matcher.accept(int(random.choice(allowed)))
            if matcher.is_ended:
                matchers[row] = grammar.matcher()
    medians = {name: round(statistics.median(each), 2) for name, each in spent.items()}
    return {**medians, "ratio": round(medians["together_us"] / medians["one_by_one_us"], 3)}


def walk(artifact: Artifact, backend: Backend, form: StructuredOutputs, steps: int) -> dict[str, float]:
    """Measure the microseconds of a token along random walks through a grammar, and how long it took to compile."""
    begun = time.perf_counter()
    grammar = backend.load(backend.compile(form))
    compiled = time.perf_counter() - begun
    random, bits = np.random.default_rng(0), np.zeros((1, mask_words(artifact.vocab_size)), np.uint32)
    matcher, spent = grammar.matcher(), []
    matcher.fill(bits, 0)
    for _ in range(steps):
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[: artifact.vocab_size])
        token = int(random.choice(allowed))
        begun = time.perf_counter()
        assert matcher.accept(token)
        if not matcher.is_ended:
            matcher.fill(bits, 0)
        spent.append(1e6 * (time.perf_counter() - begun))
        if matcher.is_ended:
            matcher = grammar.matcher()
            matcher.fill(bits, 0)
    p50, p99 = np.percentile(spent, [50, 99]).round(1).tolist()
    return {"compile_ms": round(1e3 * compiled, 1), "p50_us": p50, "p99_us": p99, "most_us": round(max(spent), 1)}


def compare(engine: Engine, vocab_size: int, requests: int, lengths: tuple[int, int], turns: int) -> dict[str, Any]:
    """Measure the seconds of a decode step without forms and with one for every sequence, and their ratio."""
    random = np.random.default_rng(0)
    runs: list[tuple[float, float]] = []
    try:
        for _ in range(turns + 1):
            prompts = random.integers(3, vocab_size, (requests, lengths[0])).tolist()
            free, held = (decode_step(engine, prompts, lengths[1], form) for form in (None, ENDLESS))
            runs.append((free, held))
    finally:
        engine.close()
    runs = runs[1:]
    return {
        "requests": requests,
        "free_step_ms": round(1e3 * statistics.median(free for free, _ in runs), 3),
        "held_step_ms": round(1e3 * statistics.median(held for _, held in runs), 3),
        "step_ratio": round(statistics.median(held / free for free, held in runs), 4),
        "turns": [[round(1e3 * free, 3), round(1e3 * held, 3)] for free, held in runs],
    }


def decode_step(engine: Engine, prompts: list[list[int]], output_len: int, form: StructuredOutputs | None) -> float:
    """Return the median seconds between two steps in which all prompts are decoded."""
    for index, prompt in enumerate(prompts):
        params = SamplingParams(
            max_tokens=output_len, seed=index, ignore_eos=form is None, structured_outputs=form, temperature=1.0
        )
        engine.add_request(f"r{index}", prompt, params)
    times: list[float] = []
    last = time.perf_counter()
    while engine.has_work:
        outputs = engine.step()
        now = time.perf_counter()
        if sum(len(output.token_ids) for output in outputs) == len(prompts):
            times.append(now - last)
        last = now
    assert len(times) >= output_len // 2, "too few steps decoded all sequences"
    return statistics.median(times[2:])


if __name__ == "__main__":
    main()
