"""A runner on a fake GPU beside the reference's, and plans that both run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import cuda_runs
import numpy as np
from fake_cublaslt import FakeCublasLt
from fake_cuda import FakeCuda
from lowered import make_plan

from inferc.config import EngineConfig
from inferc.errors import UnsupportedError
from inferc.kv_groups import cache_groups
from inferc.runtime.artifact.load import Artifact, load_artifact
from inferc.runtime.runners.cuda import cublaslt
from inferc.runtime.runners.cuda.driver import Driver
from inferc.runtime.runners.cuda.runner import CudaRunner
from inferc.runtime.runners.cuda.weights import placer
from inferc.runtime.runners.reference import ReferenceRunner
from inferc.runtime.step.plan import F32, SampleRows, StepPlan, StepResult, TokenLists

LIBRARY = "-library"  # of an artifact that leaves all its products of two rows and more to cuBLASLt
ARTIFACTS = Path(os.environ.get("INFERC_FAKE_GPU_ARTIFACTS", "."))
MODELS = os.environ.get("INFERC_FAKE_GPU_MODELS", "").split()
# As a share of the largest logit: to bfloat16 the interpreter truncates, and a key near the middle of two integers may
# become either.
TOLERANCE = {"llama": 2e-5, "llama-int8": 2e-5, "qwen3": 0.08, "experts-int8": 5e-3}
TOLERANCE |= {f"{name}{LIBRARY}": TOLERANCE[name] for name in ("llama", "qwen3")}
PROMPT, OTHER = [5, 7, 11, 13, 17, 19, 23, 29, 31], list(range(40, 75))


def plans() -> list[StepPlan]:
    """Two prompts; decode beside the rest of one and another; three that decode."""
    return [
        make_plan([(0, PROMPT, 0), (2, OTHER[:20], 0)]),
        make_plan([(0, [8], 9), (2, OTHER[20:], 20), (1, [9, 10], 0)]),
        make_plan([(2, [3], 35), (0, [4], 10), (1, [6], 2)]),
    ]


@dataclass
class Pair:
    """The two runners; `fake` is the GPU of the first, `library` the cuBLASLt on it."""

    artifact: Artifact
    fake: FakeCuda
    library: FakeCublasLt | None
    runner: CudaRunner
    oracle: ReferenceRunner

    def run(self, plan: StepPlan) -> StepResult:
        return cuda_runs.run(self.runner, plan)

    def expected(self, plan: StepPlan) -> StepResult:
        self.oracle.submit(plan)
        return self.oracle.wait()

    def logits(self, plan: StepPlan) -> F32:
        return cuda_runs.logits(self.runner, self.artifact, plan)


def sampled(plan: StepPlan, **changes: object) -> StepPlan:
    """Return the plan with rows that are sampled as given: lists, and numbers for all rows or one for each."""
    rows = len(plan.logits_rows)
    arrays = {
        name: value if isinstance(value, TokenLists) else np.broadcast_to(np.asarray(value), (rows,)).copy()
        for name, value in changes.items()
    }
    greedy = SampleRows.greedy(plan.sample.seq_slots)
    fields = {
        name: value if isinstance(value, TokenLists) else value.astype(getattr(greedy, name).dtype)
        for name, value in arrays.items()
    }
    plan.sample = replace(greedy, **fields)  # type: ignore[arg-type]
    return plan


def config(artifact: Artifact, **changes: Any) -> EngineConfig:
    pool = 40 * artifact.block_size * artifact.kv_bytes_per_token
    fields = {"max_num_seqs": 4, "max_num_batched_tokens": 96, "kv_memory_bytes": pool}
    return EngineConfig(**{**fields, **changes})


@contextmanager
def opened(
    name: str,
    *,
    checked: bool = True,
    with_library: Callable[[FakeCuda], FakeCublasLt] | None = None,
    max_graphs: int | None = None,
    **changes: Any,
) -> Iterator[Pair]:
    """An artifact of the session on a fake GPU; if `checked`, at the end, for its use as a GPU may be used.

    with_library: what cuBLASLt is on its machine, if any; max_graphs: for how many the GPU has memory.
    """
    reference = load_artifact(ARTIFACTS / f"{name.removesuffix(LIBRARY)}-reference")
    artifact = load_artifact(ARTIFACTS / name)
    fake = FakeCuda(artifact.path, max_graphs=max_graphs)
    library = None if with_library is None else with_library(fake)

    def open_library(newest: int) -> FakeCublasLt:
        if library is None:
            raise UnsupportedError(f"no libcublasLt.so.{newest} on this machine")
        return library

    groups = cache_groups(artifact.kv_groups)
    resolved = config(artifact, **changes).resolve(artifact.max_model_len, artifact.block_size, groups, 1 << 30)
    with mock.patch.object(cublaslt, "open_library", open_library):
        runner = CudaRunner(artifact, resolved, Driver(library=fake), placer(artifact), owns_driver=True, poison=True)
    oracle = ReferenceRunner(reference, resolved)
    yield Pair(artifact, fake, library, runner, oracle)
    if not checked:
        return
    fake.check()
    runner.close()
    assert not fake.device and not fake.host
    assert library is None or not library.objects
