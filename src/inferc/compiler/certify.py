"""The certificate: how far each pass, and the compiled kernels, moved the logits from the Hugging Face model's.

Every row compares logits over the same few prompts with the float32 Hugging Face model. A float32 row must stay within
`drift.FLOAT32_BUDGET`; a row in another dtype may be no worse than `REFERENCE_FACTOR` times Hugging Face's own run in
that dtype, in the mean and at every position (`_judge`). The row of a lossy pass (weights, rows or the KV cache in
integers) has the budget of all lossy passes up to it, and later rows may be no worse than that row, judged the same
way. The tokens that the kernels generate one by one must be those that they find most likely in a prefill of the same
tokens. This module imports every stage, as build.py does.
"""

from __future__ import annotations

import logging
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inferc.backends.partition import RankProgram
from inferc.compiler import drift
from inferc.errors import VerifyError
from inferc.frontend.checkpoint.load import Checkpoint
from inferc.frontend.reference import reference_greedy, reference_logits, reference_model
from inferc.ir import weights as weight_lib
from inferc.ir.program import Program
from inferc.ir.reference import (
    IN_PLACE,
    Chunk,
    ReadWeight,
    dense_inputs,
    new_dense_caches,
    new_kv_caches,
    run_partitioned,
    step_inputs,
    uses_dense_cache,
)
from inferc.ir.weights import TensorReader
from inferc.passes.quantize.schemes import Budget, budgets_of, together
from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.engine.engine import Engine
from inferc.runtime.engine.load import load_engine
from inferc.runtime.runners.api import ObservableRunner
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.targets import find_spec

log = logging.getLogger(__name__)

NEAR_TIE = 1e-3  # logits this close may swap places when float32 sums are added in another order
PROMPT_LENGTHS = (7, 24, 40, 64)
GREEDY_TOKENS = 16
PROMPT_TEXT = (
    "def read_lines(path):\n    with open(path) as file:\n        return [line.rstrip() for line in file]\n",
    "The compiler reads the model once, writes what the machine needs to run it, and never has to look at it again. ",
    "Question: what is the capital of France, and which river runs through it? Answer: ",
    (
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n"
        "    def push(self, item):\n        self.items.append(item)\n"
    ),
)
SMALL_MODEL = 50_000_000  # the number of parameters below which a model is small


@dataclass(frozen=True)
class Row:
    """A line of the certificate; errors are those of centred logits, KL is from the float32 reference, in nats."""

    name: str
    ran_by: str  # transformers, reference (the ops' references), or the target's kernels and the machine
    dtype: str
    # max_abs_error, relative_error and kl are None where the logits are not all finite numbers.
    max_abs_error: float | None
    relative_error: float | None  # the root mean square of the error, relative to that of the reference's logits
    kl: float | None  # the mean over positions
    top1_agreement: float
    greedy_equal: int | None = None  # how many prompts have the greedy tokens of transformers in the same dtype
    ok: bool = True
    reason: str = ""


@dataclass
class Certificate:
    """The rows of a certificate in the order of the compile; `scope` says which weights they were computed with."""

    scope: str
    prompts: list[list[int]]
    rows: list[Row] = field(default_factory=list)
    lossy: list[Budget] = field(default_factory=list)  # the budgets of the passes that round to integers, in order

    def to_json(self) -> dict[str, Any]:
        return {
            "scope": self.scope,
            "ok": all(row.ok for row in self.rows),
            "budgets": {
                "float32_relative_error": drift.FLOAT32_BUDGET,
                "kl_factor": drift.REFERENCE_FACTOR,
                **self._lossy(),
            },
            "num_positions": sum(len(prompt) for prompt in self.prompts),
            "prompts": self.prompts,
            "rows": [asdict(row) for row in self.rows],
        }

    def _lossy(self) -> dict[str, Any]:
        return {each.name: {"max_kl": each.max_kl, "min_top1": each.min_top1} for each in self.lossy}


def make_prompts(encode: Callable[[str], list[int]] | None, vocab_size: int, max_model_len: int) -> list[list[int]]:
    """Return the token ids of a few prompts of different lengths: text where there is a tokenizer, else random ids."""
    generator = np.random.default_rng(0)
    prompts = []
    for length, text in zip(PROMPT_LENGTHS, PROMPT_TEXT, strict=True):
        length = max(1, min(length, max_model_len - GREEDY_TOKENS))
        ids = encode(text * 8) if encode is not None else generator.integers(0, vocab_size, length).tolist()
        prompts.append(ids[:length])
    return prompts


class Certifier:
    """A collector of certificate rows while a program is lowered and its artifact is run.

    It refuses rows that drifted. scope: a sentence for the certificate. allow_drift: record a row over its budget and
    go on. kernels_round: whether the target's kernels round rows that the program keeps in floats, so that the kernels
    of a quantized program are judged by the budget of its lossy passes again.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: str,
        prompts: list[list[int]],
        scope: str,
        *,
        max_model_len: int,
        allow_drift: bool = False,
        kernels_round: bool = False,
    ) -> None:
        self.certificate = Certificate(scope, prompts)
        self._reader: TensorReader = checkpoint.reader
        self._dtype, self._allow_drift, self._kernels_round = dtype, allow_drift, kernels_round
        self._graph = ""
        self._has_router = False
        self.greedy_tokens = max(0, min(GREEDY_TOKENS, max_model_len - max(map(len, prompts))))
        wide = reference_model(checkpoint, "float32", max_model_len)
        self.reference = [reference_logits(wide, prompt) for prompt in prompts]
        model = wide if dtype == "float32" else reference_model(checkpoint, dtype, max_model_len)
        self.greedy = [reference_greedy(model, prompt, self.greedy_tokens) for prompt in prompts]
        self._model = model
        # The KL per position of the run that later rows must not be worse than, and the name of that run.
        self._reference_kl: Tensor | None = None
        self._reference_name = f"transformers' own in {dtype}"
        # The joint budget of the lossy passes, if the next row is the first after one of them.
        self._budget: Budget | None = None
        if dtype != "float32":
            logits = [reference_logits(model, prompt) for prompt in prompts]
            row, self._reference_kl = self._compare("hugging_face", "transformers", logits)
            self.certificate.rows.append(row)

    def observe(self, index: int, name: str, rewrites: int, program: Program) -> None:
        """Run the ops' references after a pass that changed anything, and add a row (a passes.pipeline.Observe)."""
        graph = re.sub(r"  #.*", "", program.to_text())
        # Choosing kernels and planning memory change no number.
        if (index and not rewrites) or graph == self._graph:
            return
        self._graph = graph
        self._has_router = "inferc.moe_experts" in graph
        self._see_lossy(program)
        values = {key: weight_lib.read_whole(weight, self._reader) for key, weight in program.weights.items()}
        logits = [run_reference(program, prompt, values.__getitem__) for prompt in self.certificate.prompts]
        self.add(name, "reference", logits)

    def _see_lossy(self, program: Program) -> None:
        """Set the budget of the next row if it is the first after a lossy pass."""
        budgets = budgets_of(program)
        if budgets != self.certificate.lossy:
            self.certificate.lossy, self._budget = budgets, together(budgets)

    def observe_ranks(self, ranks: Sequence[RankProgram]) -> None:
        """Run the ranks' lowered programs together by the ops' references after the partition, and add a row."""
        stages = [
            [each.program for each in ranks if each.pp_stage == stage]
            for stage in range(1 + max(each.pp_stage for each in ranks))
        ]
        prompts = self.certificate.prompts
        logits = run_partitioned(stages, self._reader, prompts, max(map(len, prompts)))
        logits = [each.float() for each in logits]
        self._see_lossy(ranks[0].program)
        self.add("partition", f"reference, {len(ranks)} ranks", logits)

    def add_kernels(self, ran_by: str, logits: Sequence[Tensor], greedy: Sequence[list[int]]) -> None:
        """Add the row of an artifact's compiled step.

        logits: one tensor [T, vocab_size] per prompt; greedy: the token ids that it generates per prompt.
        """
        equal = sum(self._same_greedy(index, found) for index, found in enumerate(greedy))
        if self._kernels_round and self.certificate.lossy:
            self._budget = together(self.certificate.lossy)
        self.add("kernels", f"{ran_by} on {platform.system()}-{platform.machine()}".lower(), logits, equal)

    def _same_greedy(self, index: int, found: list[int]) -> bool:
        """Return whether the greedy tokens of prompt `index` are as expected.

        In float32, different tokens also count as equal if the reference finds them equally likely where they first
        differ.
        """
        expected = self.greedy[index]
        if found == expected:
            return True
        if self._dtype != "float32" or len(found) != len(expected):
            return False
        part = next(at for at, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1])
        logits = reference_logits(self._model, self.certificate.prompts[index] + expected[:part])[-1]
        return bool((logits[expected[part]] - logits[found[part]]).abs() < NEAR_TIE)

    def add(self, name: str, ran_by: str, logits: Sequence[Tensor], greedy_equal: int | None = None) -> None:
        row, kl = self._compare(name, ran_by, logits)
        row = replace(row, greedy_equal=greedy_equal, reason=self._judge(row, kl, greedy_equal))
        row = replace(row, ok=not row.reason)
        self.certificate.rows.append(row)
        if self._budget is not None:  # later rows compute the same integers: this row is their reference
            if bool(kl.isfinite().all()):  # a row that is kept with --allow-drift but not finite can be no reference
                self._reference_kl, self._reference_name = (
                    kl,
                    f"the {self._budget.name} program's own by the references",
                )
            self._budget = None
        log.info("certificate: %s by %s: relative error %s, KL %s", name, ran_by, row.relative_error, row.kl)
        if not row.ok and not self._allow_drift:
            raise VerifyError(f"{name} (run by {row.ran_by}): {row.reason}; --allow-drift compiles it all the same")

    def _compare(self, name: str, ran_by: str, found: Sequence[Tensor]) -> tuple[Row, Tensor]:
        """Return the row without judgement, and the KL of each position.

        found: one tensor of logits [T, vocab_size] per prompt.
        """
        found_drift = drift.measure(found, self.reference)
        row = Row(
            name,
            ran_by,
            self._dtype,
            max_abs_error=drift.figure(found_drift.max_abs_error),
            relative_error=drift.figure(found_drift.relative_error),
            kl=drift.figure(float(found_drift.kl.mean())),
            top1_agreement=round(found_drift.top1_agreement, 4),
        )
        return row, found_drift.kl

    def _judge(self, row: Row, kl: Tensor, greedy_equal: int | None) -> str:
        """Return why the row is over its budget; empty if it is not."""
        if row.max_abs_error is None or row.relative_error is None or row.kl is None:
            return "its logits are not all finite numbers"
        if self._budget is not None:
            return drift.over_budget(row.kl, row.top1_agreement, self._budget)
        if self._reference_kl is None:
            if reason := drift.over_float32(row.relative_error):
                return reason
            if greedy_equal is not None and greedy_equal < len(self.certificate.prompts):
                return (
                    f"greedy tokens differ from transformers' in {len(self.certificate.prompts) - greedy_equal} prompts"
                )
            return ""
        return self._judge_positions(kl, self._reference_kl)

    def _judge_positions(self, kl: Tensor, own: Tensor) -> str:
        return drift.over_own(kl, own, self._reference_name, self._has_router)


@contextmanager
def threads_for(num_parameters: int) -> Iterator[None]:
    """Use one torch thread for a small model, whose products are too small to gain from more threads.

    The references' last bits depend on the number of threads, so what compares with a certificate does the same.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1 if num_parameters < SMALL_MODEL else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_reference(program: Program, token_ids: list[int], read_weight: ReadWeight) -> Tensor:
    """Compute logits [T, vocab_size] of one sequence by the ops' references.

    The program may be at any stage of lowering.
    """
    count = len(token_ids)
    if uses_dense_cache(program):
        inputs = dense_inputs([token_ids], [0], new_dense_caches(program, 1, count))
    elif program.block_size:
        blocks = range(1, 1 - (-count // program.block_size))  # block 0 is reserved for padding
        caches = new_kv_caches(program, len(blocks) + 1)
        inputs = step_inputs(program, [Chunk(token_ids, 0, blocks)], caches)
    else:  # inputs are [1, T] as captured, [T] once the batch is flattened
        known = {"token_ids": torch.tensor(token_ids), "positions": torch.arange(count)}
        dims = {node.name: node.meta["val"].dim() for node in program.inputs()}
        inputs = {name: value[None] if dims[name] == 2 else value for name, value in known.items() if name in dims}
    with torch.inference_mode():
        logits: Tensor = program.run(inputs, read_weight, calls=IN_PLACE)[-1]
    return logits.reshape(count, -1).float()


def run_kernels(
    artifact: Path, prompts: list[list[int]], num_greedy: int, *, token_budget: int = 64
) -> tuple[str, list[Tensor], list[list[int]]]:
    """Run an artifact's compiled step on prompts; return (name, logits, greedy).

    name: that of the runner; logits: one tensor [T, vocab_size] per prompt; greedy: the greedy token ids per prompt.
    token_budget: the most tokens of a step; a longer prompt is computed in chunks. Raises VerifyError if decoding gives
    other tokens than a prefill of the same tokens finds most likely. There is no tolerance, since the bits of a row
    depend on its own sequence only. This does not hold for onnxruntime and TensorRT, so they are not checked.
    """
    loaded = load_artifact(artifact)
    engine = load_engine(loaded, max_num_seqs=len(prompts), max_num_batched_tokens=token_budget, prefix_cache=False)
    runner = engine.runner
    assert isinstance(runner, ObservableRunner), "only compiled steps are observed"
    in_any_batch = find_spec(loaded.manifest.targets[0]).deterministic != "never"
    try:
        logits = [_scored_logits(engine, runner, prompt) for prompt in prompts]
        greedy: list[list[int]] = [[] for _ in prompts]
        params = SamplingParams(temperature=0.0, max_tokens=max(1, num_greedy), ignore_eos=True)
        for index, prompt in enumerate(prompts if num_greedy else []):
            engine.add_request(str(index), prompt, params)
        while engine.has_work:
            for output in engine.step():
                greedy[int(output.request_id)] += output.token_ids
        for prompt, tokens in zip(prompts, greedy, strict=True):
            if not in_any_batch:
                break
            again = _scored_logits(engine, runner, [*prompt, *tokens[:-1]]) if tokens else None
            if again is not None and again[len(prompt) - 1 :].numpy().argmax(-1).tolist() != tokens:
                raise VerifyError(
                    f"kernels: decoding after {len(prompt)} tokens gives {tokens}, and a prefill of the same tokens"
                    " finds others most likely: the compiled code is wrong, please report it"
                )
    finally:
        engine.close()
    return runner.name, logits, greedy


def _scored_logits(engine: Engine, runner: ObservableRunner, prompt: list[int]) -> Tensor:
    """Return the logits of every position of a prompt, observed while the engine scores it."""
    seen: list[Tensor] = []
    runner.watch_logits(lambda rows: seen.append(torch.from_numpy(rows)))
    engine.score("certificate", [*prompt, 0])  # one token more: logits are computed to score the token after them
    while engine.has_work:
        engine.step()
    engine.take_scores()
    runner.watch_logits(None)
    return torch.cat(seen)


def encoder(tokenizer_json: bytes | None) -> Callable[[str], list[int]] | None:
    """Return a function from text to ids by an artifact's tokenizer.json; None without one."""
    if tokenizer_json is None:
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    return lambda text: list(tokenizer.encode(text).ids)
