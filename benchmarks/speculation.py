"""Measure what speculation gives: tokens per second with drafts, as a ratio to those without, in the same run.

    python benchmarks/speculation.py OUT [--turns 5] [--output-len 160] [--threads N] [--requests 32] [--out FILE]

Three things are measured, each in turn without and with drafts; the result is the median of the turns' ratios, and the
first turn warms up. Tokens are counted from the first one of an answer on. *Texts*: one sequence at a time that edits
code, sums up a text with quotations, and goes on freely, with the n-gram drafter. *Load*: `--requests` sequences at
once of random tokens, sampled, in which nothing repeats, and of edits of code. *Oracle*: a drafter that knows the
answer and is right with a given probability a token, on one sequence: what any drafter of that acceptance could give.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from measured import report

from inferc.runtime.artifact.load import Artifact, load_artifact
from inferc.runtime.engine.engine import Engine
from inferc.runtime.engine.load import load_engine
from inferc.runtime.scheduler.batch import Batch
from inferc.runtime.speculation.drafter import Drafter, Offer
from inferc.runtime.speculation.speculation import Speculation
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.text.tokenizer import Text
from inferc.system.resources import available_cores

CODE = '''class Counter:
    """A counter of events by name."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def add(self, name: str, count: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + count

    def most(self) -> str | None:
        return max(self.counts, key=self.counts.__getitem__, default=None)
'''
STORY = """The harbour office wrote on Monday that "the new pier will be opened to ferries before the end of June". The
mayor said: "We have waited nine years for this, and we will not wait another summer." Fishermen are less glad: "Nobody
has asked us where our boats are to lie", says Anna Berg, who has landed cod here since 1987."""
TASKS = {
    "edit": f"Rename the class Counter to Tally, and change nothing else. Write the whole code.\n```python\n{CODE}```",
    "quotes": f"Sum up the text, and quote everybody in it word for word.\n\n{STORY}",
    "free": "Write a long story about a lighthouse keeper and a storm.",
}
ACCEPTANCES = (0.0, 0.5, 0.7, 0.8, 0.9)


class Oracle(Drafter):
    """A drafter that knows the answers, and drafts each token right with one probability."""

    def __init__(self) -> None:
        self.answers: dict[str, list[int]] = {}
        self.acceptance = 1.0
        self._random = random.Random(0)

    def offers(self, batch: Batch, slots: Sequence[int]) -> list[Offer]:
        return [Offer(15, int(10 * self.acceptance), 0.7) for _ in slots]

    def draft(self, batch: Batch, slots: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
        drafts = []
        for slot, count in zip(slots, counts, strict=True):
            seq = batch.seqs[slot]
            assert seq is not None
            done = int(batch.num_known[slot]) - seq.prompt_len
            right = self.answers[seq.request_id][done : done + count]
            drafts.append([each if self._random.random() < self.acceptance else each ^ 1 for each in right])
        return drafts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path, metavar="OUT", help="a folder that `inferc compile` wrote")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--output-len", type=int, default=160)
    parser.add_argument("--requests", type=int, default=32, help="number of concurrent requests under load")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--out", type=Path, help="a JSON file for all numbers")
    options = parser.parse_args()
    if options.turns < 1 or options.requests < 1 or options.output_len < 8:
        parser.error("expected at least one turn, one request and eight new tokens")
    artifact = load_artifact(options.artifact)
    engines = {
        method: load_engine(artifact, max_num_seqs=options.requests, num_threads=options.threads, speculate=method)
        for method in ("none", "ngram")
    }
    found: dict[str, Any] = {"artifact": options.artifact.name, "threads": options.threads, "turns": options.turns}
    try:
        found |= {"texts": texts(artifact, engines, options.turns, options.output_len)}
        found |= {"load": load(artifact, engines, options.turns, options.requests, options.output_len // 2)}
    finally:
        for engine in engines.values():
            engine.close()
    found |= {"oracle": oracle(artifact, options.turns, options.output_len, options.threads)}
    report(found, options.out)


def encode(artifact: Artifact, task: str) -> list[int]:
    text = Text(artifact.tokenizer)
    return text.encode_chat([{"role": "user", "content": task}]) if text.has_chat_template else text.encode(task)


def texts(artifact: Artifact, engines: dict[str, Engine], turns: int, output_len: int) -> dict[str, Any]:
    """Measure one sequence at a time, greedy, by task."""
    found = {}
    for name, task in TASKS.items():
        prompt = encode(artifact, task)
        found[name] = compare(engines, [prompt], turns, SamplingParams(temperature=0, max_tokens=output_len))
    return found


def load(artifact: Artifact, engines: dict[str, Engine], turns: int, requests: int, output_len: int) -> dict[str, Any]:
    """Measure many sequences at once."""
    draw = np.random.default_rng(0)
    noise = [draw.integers(3, artifact.vocab_size, 64).tolist() for _ in range(requests)]
    edit = encode(artifact, TASKS["edit"])
    sampled = SamplingParams(temperature=1.0, seed=1, max_tokens=output_len, ignore_eos=True)
    greedy = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    return {
        "requests": requests,
        "noise": compare(engines, noise, turns, sampled),
        "edits": compare(engines, [edit] * requests, turns, greedy),
    }


def compare(engines: dict[str, Engine], prompts: list[list[int]], turns: int, params: SamplingParams) -> dict[str, Any]:
    """Measure both engines in turn; the tokens must be the same."""
    runs = []
    before = engines["ngram"].stats()
    for turn in range(turns + 1):
        order = list(engines)[:: 1 if turn % 2 else -1]
        done = {method: generate(engines[method], prompts, params) for method in order}
        assert done["none"][1] == done["ngram"][1], "drafts changed an answer"
        runs.append((done["none"][0], done["ngram"][0]))
    now, runs = engines["ngram"].stats(), runs[1:]
    drafted, accepted = now.num_drafted - before.num_drafted, now.num_accepted - before.num_accepted
    return {
        "none_tokens_per_s": round(statistics.median(none for none, _ in runs), 1),
        "ngram_tokens_per_s": round(statistics.median(ngram for _, ngram in runs), 1),
        "ratio": round(statistics.median(ngram / none for none, ngram in runs), 3),
        "accepted": round(accepted / drafted, 3) if drafted else None,
        "runs": [[round(none, 1), round(ngram, 1)] for none, ngram in runs],
    }


def oracle(artifact: Artifact, turns: int, output_len: int, threads: int) -> dict[str, Any]:
    """Measure one sequence whose drafts are right as often as told."""
    drafter = Oracle()
    plain = load_engine(artifact, max_num_seqs=1, num_threads=threads)
    drafting = load_engine(artifact, max_num_seqs=1, num_threads=threads, speculate="ngram")
    speculation = drafting.speculation
    assert isinstance(speculation, Speculation)
    speculation.drafter = drafter
    prompt = np.random.default_rng(0).integers(3, artifact.vocab_size, 256).tolist()
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    found: dict[str, Any] = {}
    try:
        drafter.answers["r0"] = generate(plain, [prompt], params)[1]["r0"]
        for drafter.acceptance in ACCEPTANCES:
            runs = []
            before = drafting.stats()
            for _ in range(turns + 1):
                none, drafted = (generate(engine, [prompt], params) for engine in (plain, drafting))
                assert none[1] == drafted[1], "drafts changed an answer"
                runs.append(drafted[0] / none[0])
            now = drafting.stats()
            num_drafts = max(1, now.num_drafts - before.num_drafts)
            found[f"{drafter.acceptance:.1f}"] = {
                "ratio": round(statistics.median(runs[1:]), 3),
                "drafted_at_once": round((now.num_drafted - before.num_drafted) / num_drafts, 1),
                "runs": [round(run, 3) for run in runs[1:]],
            }
    finally:
        plain.close()
        drafting.close()
    return found


def generate(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> tuple[float, dict[str, list[int]]]:
    """Return the tokens per second after the first tokens, and all tokens by request."""
    found: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        found[f"r{index}"] = []
        engine.add_request(f"r{index}", prompt, params)
    begun, first = 0.0, 0
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] += output.token_ids
        if not begun and all(found.values()):
            begun, first = time.perf_counter(), sum(map(len, found.values()))
    return (sum(map(len, found.values())) - first) / (time.perf_counter() - begun), found


if __name__ == "__main__":
    main()
