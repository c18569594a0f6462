"""The question whether a lowered program is the model, asked of the shortest model that has all its kinds of layers.

The program is cut to its first layers and computed in exact arithmetic (ir/exact.py), so that a projection that is off
by a ten-thousandth shows, whatever the artifact's dtype. It is compared with transformers' own model of the same first
layers, three times: with the real weights; with random ones, since trained norms and biases hide mistakes near 1 and 0;
and with small random ones, beside which an epsilon counts. Windows and chunks are shortened on both sides, so that a
short text reaches beyond them; it is computed in two chunks, whose border lies within a block of the KV cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inferc.backends.lower import LowerConfig
from inferc.backends.partition import RankProgram, Ranks, by_stage, lower_ranks
from inferc.compiler import drift
from inferc.compiler.certificate import Certificate, Judge, computed_text
from inferc.frontend.check import check_positions, checkpoint_form, example, run_eager, shrink
from inferc.frontend.checkpoint.load import Checkpoint
from inferc.frontend.reference import reference_logits, reference_model
from inferc.frontend.wide import computing_in
from inferc.ir import program as program_lib
from inferc.ir.exact import exact, read_exactly, run_exactly
from inferc.ir.layer_kinds import Kind, distinct_prefix, first_layers, layer_kinds, prefix_lengths
from inferc.ir.ops.quantize import unrounded
from inferc.ir.program import Program, named_arguments
from inferc.ir.reference import run_partitioned
from inferc.ir.weights import TensorReader
from inferc.passes.pipeline import Observe
from inferc.system.progress import Progress
from inferc.system.resources import available_memory_bytes

FAR_TOKENS = 24  # of the captured program, at the end of the context, where a scaled rope is in force
FIRST_CHUNK = 29  # tokens of the first chunk: it ends within a block of the KV cache
NUM_TOKENS = 80
TOKENS_PER_EXPERT = 8  # as many tokens as give every expert this many on average, within MAX_TOKENS
MAX_TOKENS = 512
SHORT_WINDOWS = (7, 11, 13, 17)  # what the windows and chunks of a config become
WINDOW_FIELDS = ("sliding_window", "attention_chunk_size")
EMBEDDING_SIZE = (
    0.01  # the standard deviation of random embeddings: small beside an epsilon that is ten times too large
)
SMALL = 0.1  # by which the small random weights are smaller than the others
POOL = 1_000_003  # random numbers, repeated: a prime, so that no two rows of a weight are equal


@dataclass(frozen=True)
class Trial:
    """One comparison: what the weights are, and whether they come from the model's own files."""

    name: str
    what: str
    scale: float | None  # the size of random weights; None: the real ones


TRIALS = (
    Trial("program", "the model's weights", None),
    Trial("program_random", "random weights", 1.0),
    Trial("program_small", "small random weights", SMALL),
)


class ShortModel:
    """A model of the first layers of a checkpoint, as a captured program and as transformers' model.

    program: the captured program of the whole model, which stays as it is; count: one of its `prefix_lengths`.
    """

    def __init__(self, checkpoint: Checkpoint, program: Program, count: int, dtype: str, max_model_len: int) -> None:
        cut = first_layers(program, count)
        if cut is None:
            raise ValueError(f"the first {count} layers are no model")
        self.checkpoint, self.program, self.count = checkpoint, cut, count
        self.dtype, self.max_model_len = dtype, max_model_len
        self.windows = short_windows(checkpoint.config, cut, max_model_len)

    @cached_property
    def model(self) -> Any:
        """The model of transformers with these layers, and the checkpoint's weights in the artifact's dtype."""

        def shorten(config: Any) -> Any:
            small = shrink(config, self.count, {}, narrow=False)
            for name in WINDOW_FIELDS:
                if getattr(small, name, None) in self.windows:
                    setattr(small, name, self.windows[getattr(small, name)])
            return small

        return reference_model(self.checkpoint, self.dtype, self.max_model_len, shorten)

    def reference(self, token_ids: Sequence[int]) -> Tensor:
        """Compute the float32 logits [T, vocab_size] by transformers' model, as it is now."""
        with computing_in(self.model, torch.float32):
            return reference_logits(self.model, token_ids)

    def lowered(self, config: LowerConfig, ranks: Ranks, observe: Observe | None = None) -> list[RankProgram]:
        """Return what the short model becomes by the passes, for each rank; `observe` sees the passes of all ranks."""
        twin = program_lib.copy(self.program)
        kept = {at: each for at, each in ranks.placements.items() if at < self.count}
        return lower_ranks(twin, config, replace(ranks, placements=kept), observe)


def short_windows(config: Any, program: Program, max_model_len: int) -> dict[int, int]:
    """Return by what size each window and chunk of a config is replaced, both in the program and in the model.

    A window that no layer of the program has, or that is as long as the longest sequence, stays as it is.
    """
    used = {int(node.args[6]) for node in program.graph.nodes if node.target == torch.ops.inferc.attention.default}
    named = [getattr(config, name, None) for name in WINDOW_FIELDS]
    sizes = sorted({size for size in named if isinstance(size, int) and size in used and size > max(SHORT_WINDOWS)})
    return dict(zip((size for size in sizes if size < max_model_len), SHORT_WINDOWS, strict=False))


def randomise(model: Any, scale: float, token_ids: Sequence[int]) -> None:
    """Give the parameters of `model` random values, but for the rows of embeddings that no token of `token_ids` reads.

    scale: the size of matrices and biases. Weights of norms are near what they were.
    """
    pool = torch.randn(POOL, generator=torch.Generator().manual_seed(0))
    embedding = model.get_input_embeddings().weight
    norms = [module for module in model.modules() if "norm" in type(module).__name__.lower()]
    of_norms = {each for module in norms for each in module.parameters()}
    head = getattr(model.get_output_embeddings(), "weight", None)
    at = 0
    for parameter in model.parameters():
        if not parameter.is_floating_point() or (parameter is head and head is not embedding):
            continue
        if parameter is embedding:
            rows = torch.tensor(sorted(set(token_ids)))
            value = parameter.data.clone()
            value[rows] = (EMBEDDING_SIZE * _take(pool, at, (len(rows), value.shape[1]))).to(value.dtype)
        elif parameter in of_norms:
            value = parameter.data + (0.2 * _take(pool, at, parameter.shape)).to(parameter.dtype)
        else:
            size = 0.2 if parameter.dim() < 2 else 0.7 * _inputs(parameter) ** -0.5
            value = _take(pool, at, parameter.shape).mul_(size * scale).to(parameter.dtype)
        parameter.data = value
        at = (at + parameter.numel() + 101) % POOL


def _inputs(parameter: Tensor) -> int:
    """Return the smaller of a matrix's last two sizes, either of which may be that of its inputs."""
    return min(parameter.shape[-2:])


def _take(pool: Tensor, start: int, shape: Sequence[int]) -> Tensor:
    """Return numbers of the pool from `start` on, around its end as often as the shape needs."""
    count = math.prod(shape)
    repeats = -(-(start + count) // len(pool))
    return pool.repeat(repeats)[start : start + count].view(*shape)


def token_ids_for(
    programs: Sequence[RankProgram], config: Any, windows: Mapping[int, int], max_model_len: int
) -> list[int]:
    """Return random token ids, as many as reach beyond every window and give every expert some work."""
    count = NUM_TOKENS
    for node in (node for each in programs for node in each.program.graph.nodes):
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        named = named_arguments(node)
        if window := named.get("window"):
            count = max(count, windows.get(window, window) + 9)
        if node.target == torch.ops.inferc.moe_experts.default:
            experts, top_k = named["gate_up"].meta["val"].shape[0], named["expert_ids"].meta["val"].shape[-1]
            count = max(count, TOKENS_PER_EXPERT * int(experts) // int(top_k))
    count = min(count, MAX_TOKENS, max_model_len)
    return [int(each) for each in np.random.default_rng(7).integers(0, int(config.vocab_size), count)]


@dataclass
class _Run:
    """A run of what a short model became, and of transformers' model, over the same tokens with the same weights."""

    short: ShortModel
    programs: Sequence[RankProgram]
    reader: TensorReader
    tokens: list[int]

    @cached_property
    def reference(self) -> Tensor:
        return self.short.reference(self.tokens)

    @cached_property
    def found(self) -> Tensor:
        """The logits [T, vocab_size] by the programs, exactly, in two chunks."""
        programs = [replace(each, program=exact(each.program, self.short.windows)) for each in self.programs]
        if len(programs) == 1:
            rest = len(self.tokens) - FIRST_CHUNK
            sizes = [FIRST_CHUNK, rest] if rest > 0 else [len(self.tokens)]
            return run_exactly(programs[0].program, self.tokens, self.reader, sizes)
        with unrounded():
            (found,) = run_partitioned(by_stage(programs), self.reader, [self.tokens], FIRST_CHUNK, read_exactly)
        return found.float()

    @cached_property
    def error(self) -> float:
        return drift.measure([self.found], [self.reference]).relative_error


class ProgramCheck:
    """The check that what a captured program was lowered to is the model, which adds one row for each trial.

    captured: the captured program of the whole model; lowered: what it became, for each rank.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        captured: Program,
        lowered: Sequence[RankProgram],
        config: LowerConfig,
        ranks: Ranks,
        max_model_len: int,
    ) -> None:
        self.checkpoint, self.captured, self.lowered = checkpoint, captured, lowered
        self.config, self.ranks, self.max_model_len = config, ranks, max_model_len
        self.total = captured.info.num_attention_layers

    def run(
        self,
        certificate: Certificate,
        allow_drift: bool,
        report: Progress,
        stage: str = "compare the program with the model",
    ) -> str:
        """Run all trials; return a sentence on what was compared. Raises VerifyError for a program that is off.

        stage: the name of the first stage that is reported.
        """
        report(stage, 0, 1)
        run = self._shortest()
        if run.short.count < self.total and self._differs_by_length(run):
            short = self._short(self.total)
            run = _Run(short, short.lowered(self.config, self.ranks), self.checkpoint.reader, run.tokens)
        short = run.short
        check_positions(short.model, self.checkpoint.name)
        left_out = []
        for index, trial in enumerate(TRIALS):
            report(f"compare {short.count} of {self.total} layers with the model: {trial.what}", index, len(TRIALS))
            if trial.scale is not None:
                if not fits(short.model):
                    left_out.append(trial.what)
                    continue
                randomise(short.model, trial.scale, run.tokens)
                run = _Run(short, run.programs, checkpoint_form(short.model, short.program), run.tokens)
            judge = Judge(certificate, [run.reference], "float32", allow_drift=allow_drift)
            why = "" if run.error <= drift.FLOAT32_BUDGET else self._blame(run)
            judge.add(trial.name, self._ran_by, [run.found], why=why)
            if trial.scale == 1.0:
                self._try_far(run, judge)
        some = "first layer" if short.count == 1 else f"first {short.count}"
        layers = "all layers" if short.count == self.total else f"the {some} of {self.total} layers"
        said = f"{layers} in float32 over {len(run.tokens)} tokens"
        return f"{said}; for want of memory without {' and '.join(left_out)}" if left_out else said

    def _try_far(self, run: _Run, judge: Judge) -> None:
        """Add a row for the program as captured, at the end of the model's context."""
        short = run.short
        tokens, positions = example(short.model, FAR_TOKENS, self.max_model_len)
        with computing_in(short.model, torch.float32):
            judge.reference = [run_eager(short.model, tokens, positions)[0]]
        captured = exact(short.program, short.windows)
        with unrounded(), torch.inference_mode():
            read = read_exactly(captured, run.reader)
            (logits,) = captured.run({"token_ids": tokens, "positions": positions}, read)
        why = f"; at positions {int(positions[0, 0])} to {int(positions[0, -1])}, as captured"
        judge.add("captured_far", "reference", [logits[0].float()], why=why)

    @property
    def _ran_by(self) -> str:
        return "reference" if self.ranks.count == 1 else f"reference, {self.ranks.count} ranks"

    def _short(self, count: int) -> ShortModel:
        return ShortModel(self.checkpoint, self.captured, count, self.captured.info.dtype, self.max_model_len)

    def _shortest(self) -> _Run:
        """Return a short model that becomes every kind of layer that the whole model became."""
        wanted, kinds = _kinds(self.lowered), layer_kinds(self.captured)
        lengths = [count for count in prefix_lengths(kinds) if count >= self.ranks.pp]
        # Passes make kinds of their own of the first layer and of the last two, so the shortest is rarely enough.
        least = distinct_prefix(kinds) + 2
        likely = [count for count in lengths if count >= least]
        for count in likely or lengths[-1:]:
            if first_layers(self.captured, count) is None:
                continue
            short = self._short(count)
            programs = short.lowered(self.config, self.ranks)
            if count == self.total or wanted <= _kinds(programs):
                tokens = token_ids_for(programs, self.checkpoint.config, short.windows, self.max_model_len)
                return _Run(short, programs, self.checkpoint.reader, tokens)
        raise AssertionError("the whole model has every kind of its layers")

    def _differs_by_length(self, run: _Run) -> bool:
        """Tell whether the model itself is another one with fewer layers, as where its config scales them by number."""
        if run.error <= drift.FLOAT32_BUDGET:
            return False
        captured = run_exactly(exact(run.short.program, run.short.windows), run.tokens, run.reader)
        return drift.measure([captured], [run.reference]).relative_error > drift.FLOAT32_BUDGET

    def _blame(self, run: _Run) -> str:
        """Return, for a message, after which pass the program is off first, and how far it was off before it."""
        stages: list[tuple[str, Program]] = []  # what computes something else than the stage before
        seen = ""

        def observe(index: int, name: str, rewrites: int, program: Program) -> None:
            nonlocal seen
            text = computed_text(program) if not index or rewrites else seen
            if text != seen:
                seen = text
                stages.append((name, exact(program, run.short.windows)))

        def error_of(program: Program) -> float:
            found = run_exactly(program, run.tokens, run.reader)
            return drift.measure([found], [run.reference]).relative_error

        run.short.lowered(self.config, self.ranks, observe)
        right, wrong = -1, len(stages)  # the last stage that is known to be right, and the first known to be off
        before = 0.0
        while wrong - right > 1:
            middle = (right + wrong) // 2
            error = error_of(stages[middle][1])
            if error <= drift.FLOAT32_BUDGET:
                right, before = middle, error
            else:
                wrong = middle
        if wrong == len(stages):
            return "; it is right before the partition"
        return f"; {stages[wrong][0]} is the first that is off (before it {before:.1e})" if wrong else "; as captured"


def _kinds(programs: Sequence[RankProgram]) -> set[Kind]:
    return {kind for each in programs for kind in layer_kinds(each.program) if kind}


def fits(model: Any) -> bool:
    """Tell whether another copy of a model's parameters, and one more for what is widened, fit in the free memory."""
    return 2 * sum(int(each.numel() * each.element_size()) for each in model.parameters()) <= available_memory_bytes()
