"""The question whether a compiled head is the head: its logits, by PyTorch and as compiled, over random rows.

A head's input is what another model makes of a text. Random rows of the same size stand for that: half of the sequence
is over rows of the model, and the rest over rows of the head's own, as where it drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inferc.compiler.certificate import Certificate, Judge
from inferc.compiler.certify import on_this_machine
from inferc.config import CompileConfig, EngineConfig
from inferc.errors import ConfigError, UnsupportedError
from inferc.frontend.checkpoint.bind import bind
from inferc.frontend.checkpoint.load import Checkpoint
from inferc.frontend.export import DTYPES
from inferc.frontend.trace import torch_export as trace
from inferc.frontend.trace.rope import fix_rope
from inferc.ir import weights as weight_lib
from inferc.ir.exact import exact, read_exactly
from inferc.ir.ops.quantize import unrounded
from inferc.ir.program import Program, name_of
from inferc.ir.reference import Chunk, new_kv_caches, run_step, step_inputs
from inferc.kv_groups import cache_groups
from inferc.passes.quantize.schemes import budgets_of, together
from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.runners.api import RunnerFactory, RunnerRequest
from inferc.runtime.runners.cpu.runner import CpuRunner
from inferc.runtime.step.plan import Rows, SampleRows, StepPlan
from inferc.targets import Target, find_spec

NUM_TOKENS = 80
FIRST_CHUNK = 29  # tokens of the first chunk: it ends within a block of the KV cache


def check_head_config(config: CompileConfig) -> None:
    """Raise ConfigError or UnsupportedError for options that a head does not take."""
    _check_place("--head-of", config, Target.parse(config.target).spec.heads)
    if config.adapter_rank:
        raise ConfigError("--head-of: a head has no place for adapters; leave --adapter-rank out")


def check_mtp_config(config: CompileConfig, is_head: bool) -> None:
    """Raise ConfigError or UnsupportedError for options that do not go with a model's MTP layers."""
    if is_head:
        raise ConfigError("--mtp: MTP layers are a model's, and --head-of compiles a head; leave one of them out")
    _check_place("--mtp", config, Target.parse(config.target).spec.mtp)


def _check_place(option: str, config: CompileConfig, can: bool) -> None:
    """Raise UnsupportedError or ConfigError for a target or for ranks that run no head."""
    if not can:
        raise Target.parse(config.target).refuse(option, "", (), "cpu")
    if max(config.tp, config.pp, config.ep) > 1:
        raise ConfigError(f"{option}: a head runs on one rank; leave --tp, --pp and --ep out")


class HeadCheck:
    """The check of one head. program: what it was lowered to."""

    def __init__(self, checkpoint: Checkpoint, program: Program, dtype: str, allow_drift: bool) -> None:
        assert checkpoint.head is not None
        self._checkpoint, self._program, self._dtype = checkpoint, program, dtype
        self._facts, self._allow_drift = checkpoint.head.facts, allow_drift
        if self._facts.own not in {name_of(node) for node in program.graph.nodes}:
            raise UnsupportedError(
                f"{checkpoint.name}: its rows ({self._facts.own}) are nowhere in the compiled step as they are; compile"
                " it without --quantize"
            )

    def run(self, artifact: Path | None) -> Certificate:
        """Return the certificate. artifact: the folder whose kernels are run; None: none. Raises VerifyError."""
        tokens = np.random.default_rng(7).integers(0, self._program.info.vocab_size, NUM_TOKENS).tolist()
        whose = ", half of them its own" if self._is_apart else ""
        certificate = Certificate(
            f"the head itself in float32 over random rows of {NUM_TOKENS} tokens{whose}", [tokens]
        )
        rows = self._rows()
        reference = [self._by_module(torch.float32, tokens, rows)]
        judge = Judge(certificate, reference, "float32", allow_drift=self._allow_drift)
        judge.add("program", "reference", [self._exactly(tokens, rows)])
        if artifact is None:
            return certificate
        lossy = budgets_of(self._program)
        certificate.lossy = lossy
        judge = Judge(certificate, reference, self._dtype, allow_drift=self._allow_drift)
        if lossy:
            judge.budget = together(lossy)
        elif self._dtype != "float32":
            judge.add_own([self._by_module(DTYPES[self._dtype], tokens, rows)])
        name, found = self._by_kernels(artifact, tokens, rows)
        judge.add("kernels", on_this_machine(name), [found])
        return certificate

    @property
    def _width(self) -> int:
        return int(self._program.input("hidden_in").meta["val"].shape[1])

    @property
    def _given(self) -> int:
        """The columns of the model's rows."""
        return self._facts.hidden_size * len(self._facts.inputs)

    @property
    def _is_apart(self) -> bool:
        """Return whether the head's own rows are beside the model's, and not in their place."""
        return self._width > self._given

    def _rows(self) -> Tensor:
        """Return the hidden rows [T, hidden_width]: the model's for the first half of the tokens, its own behind."""
        rows = torch.randn(NUM_TOKENS, self._width, generator=torch.Generator().manual_seed(7))
        if self._is_apart:
            rows[: NUM_TOKENS // 2, self._given :] = 0
            rows[NUM_TOKENS // 2 :, : self._given] = 0
        return rows.to(DTYPES[self._dtype]).float()

    @cached_property
    def _module(self) -> Any:
        """The head in PyTorch, with the checkpoint's weights in the artifact's dtype."""
        dtype = DTYPES[self._dtype]
        kind, config = self._checkpoint.model_class, self._checkpoint.config
        binding = bind(trace.build(kind, config, dtype, "meta"), self._checkpoint)
        head = trace.build(kind, config, dtype, "cpu")
        values = {name: weight_lib.read_whole(each, self._checkpoint.reader) for name, each in binding.weights.items()}
        head.load_state_dict({name: value.to(dtype) for name, value in values.items()})
        fix_rope(head, self._program.info.max_model_len)
        return head

    def _by_module(self, dtype: torch.dtype, tokens: Sequence[int], rows: Tensor) -> Tensor:
        head = self._module.to(dtype)
        with trace.quiet(), torch.inference_mode():
            positions = torch.arange(len(tokens))[None]
            logits: Tensor = head(torch.tensor([tokens]), positions, rows[None].to(dtype))[0].float()
        return logits

    def _chunks(self, tokens: Sequence[int]) -> list[tuple[slice, Chunk]]:
        blocks = range(1, 2 + len(tokens) // self._program.block_size)
        parts = (slice(0, FIRST_CHUNK), slice(FIRST_CHUNK, len(tokens)))
        return [(part, Chunk(tokens[part], part.start, blocks)) for part in parts]

    def _exactly(self, tokens: Sequence[int], rows: Tensor) -> Tensor:
        """Return the logits by the program in exact arithmetic."""
        program = exact(self._program)
        caches, found = new_kv_caches(program, 2 + len(tokens) // program.block_size), []
        with unrounded():
            for part, chunk in self._chunks(tokens):
                inputs = {**step_inputs(program, [chunk], caches), "hidden_in": rows[part]}
                found.append(run_step(program, inputs, read_exactly(program, self._checkpoint.reader))[1].float())
        return torch.cat(found)

    def _by_kernels(self, folder: Path, tokens: Sequence[int], rows: Tensor) -> tuple[str, Tensor]:
        """Return the name of what runs the kernels here, and the logits that they compute."""
        artifact = load_artifact(folder)
        factory: RunnerFactory = find_spec(artifact.manifest.targets[0]).find_runner()
        config = EngineConfig(max_num_seqs=NUM_TOKENS, max_num_batched_tokens=NUM_TOKENS, prefix_cache=False)
        groups = cache_groups(artifact.whole_kv_groups)
        runner = factory.open(
            RunnerRequest(artifact, artifact.manifest.targets[0], config, groups, artifact.verify_weights().wait)
        ).runner
        assert isinstance(runner, CpuRunner), "the only compiled target that runs heads"
        found: list[Tensor] = []
        runner.watch_logits(lambda logits: found.append(torch.from_numpy(logits)))
        try:
            for part, chunk in self._chunks(tokens):
                plan = self._plan(chunk)
                runner.score(plan, np.zeros(len(plan.token_ids), np.int32), _stored(rows[part], self._dtype))
        finally:
            runner.close()
        return runner.name, torch.cat(found)

    def _plan(self, chunk: Chunk) -> StepPlan:
        """Return the plan of a step over a chunk, all rows of which are scored."""
        program = self._program
        inputs: dict[str, Any] = {name: each.numpy() for name, each in step_inputs(program, [chunk], []).items()}
        count = len(chunk.token_ids)
        places = np.arange(chunk.num_computed_tokens, chunk.num_computed_tokens + count)
        blocks = np.array(chunk.blocks, np.int32)
        slots = blocks[places // program.block_size].astype(np.int64) * program.block_size + places % program.block_size
        groups = len(program.kv_groups)
        return StepPlan(
            **inputs,
            slot_mapping=(slots,) * groups,
            block_tables=(blocks[None],) * groups,
            sample=SampleRows.greedy(np.zeros(count, np.int32)),
        )


def _stored(rows: Tensor, dtype: str) -> Rows:
    """Return rows as a runner takes them, bfloat16 as its bits."""
    cast = rows.to(DTYPES[dtype])
    stored: Rows = (cast.view(torch.uint16) if cast.dtype == torch.bfloat16 else cast).numpy()
    return stored
