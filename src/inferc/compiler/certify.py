"""The whole certificate (`--certify full`): how far each pass, and the compiled kernels, moved the logits of the model.

Every row compares logits over the same few prompts with the float32 Hugging Face model (see certificate.py for the
budgets). The tokens that the kernels generate one by one must be those that they find most likely in a prefill of the
same tokens. This module imports every stage, as build.py does.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from inferc.backends.partition import RankProgram, by_stage
from inferc.compiler import drift
from inferc.compiler.certificate import Certificate, Judge, computed_text
from inferc.compiler.prompts import GREEDY_TOKENS
from inferc.frontend.checkpoint.load import Checkpoint
from inferc.frontend.reference import reference_greedy, reference_logits, reference_model
from inferc.ir import weights as weight_lib
from inferc.ir.program import Program
from inferc.ir.reference import run_partitioned, run_sequence
from inferc.ir.weights import TensorReader
from inferc.passes.quantize.schemes import budgets_of, together

NEAR_TIE = 1e-3  # logits this close may swap places when float32 sums are added in another order
SMALL_MODEL = 50_000_000  # the number of parameters below which a model is small


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
        self._dtype, self._kernels_round = dtype, kernels_round
        self._text = ""
        self.greedy_tokens = max(0, min(GREEDY_TOKENS, max_model_len - max(map(len, prompts))))
        wide = reference_model(checkpoint, "float32", max_model_len)
        self.reference = [reference_logits(wide, prompt) for prompt in prompts]
        self.certificate.perplexity = drift.perplexity(self.reference, prompts)
        model = wide if dtype == "float32" else reference_model(checkpoint, dtype, max_model_len)
        self.greedy = [reference_greedy(model, prompt, self.greedy_tokens) for prompt in prompts]
        self._model = model
        self.judge = Judge(self.certificate, self.reference, dtype, prompts=prompts, allow_drift=allow_drift)
        if dtype != "float32":
            self.judge.add_own([reference_logits(model, prompt) for prompt in prompts])

    def observe(self, index: int, name: str, rewrites: int, program: Program) -> None:
        """Run the ops' references after a pass that changed anything, and add a row (a passes.pipeline.Observe)."""
        text = computed_text(program)
        # Choosing kernels and planning memory change no number.
        if (index and not rewrites) or text == self._text:
            return
        self._text = text
        self.judge.has_router = "inferc.moe_experts" in text
        self._see_lossy(program)
        values = {key: weight_lib.read_whole(weight, self._reader) for key, weight in program.weights.items()}
        logits = [run_sequence(program, prompt, values.__getitem__) for prompt in self.certificate.prompts]
        self.judge.add(name, "reference", logits)

    def _see_lossy(self, program: Program) -> None:
        """Set the budget of the next row if it is the first after a lossy pass."""
        budgets = budgets_of(program)
        if budgets != self.certificate.lossy:
            self.certificate.lossy, self.judge.budget = budgets, together(budgets)

    def observe_ranks(self, ranks: Sequence[RankProgram]) -> None:
        """Run the ranks' lowered programs together by the ops' references after the partition, and add a row."""
        prompts = self.certificate.prompts
        logits = run_partitioned(by_stage(ranks), self._reader, prompts, max(map(len, prompts)))
        logits = [each.float() for each in logits]
        self._see_lossy(ranks[0].program)
        self.judge.add("partition", f"reference, {len(ranks)} ranks", logits)

    def add_kernels(self, ran_by: str, logits: Sequence[Tensor], greedy: Sequence[list[int]]) -> None:
        """Add the row of an artifact's compiled step.

        logits: one tensor [T, vocab_size] per prompt; greedy: the token ids that it generates per prompt.
        """
        equal = sum(self._same_greedy(index, found) for index, found in enumerate(greedy))
        if self._kernels_round and self.certificate.lossy:
            self.judge.budget = together(self.certificate.lossy)
        self.judge.add("kernels", on_this_machine(ran_by), logits, equal)

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


def on_this_machine(ran_by: str) -> str:
    """Return the name of a runner with that of the machine, for a row of the certificate."""
    return f"{ran_by} on {platform.system()}-{platform.machine()}".lower()


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
