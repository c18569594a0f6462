"""A runner on a fake GPU beside the reference's, and plans that both run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cuda_runs
from fake_cuda import FakeCuda

from inferc.config import EngineConfig
from inferc.kv_pools import cache_groups
from inferc.runtime.artifact import Artifact, load_artifact
from inferc.runtime.cuda.driver import Driver
from inferc.runtime.cuda.runner import CudaRunner
from inferc.runtime.reference_runner import ReferenceRunner
from inferc.runtime.step import F32, StepPlan, StepResult

ARTIFACTS = Path(os.environ.get("INFERC_FAKE_GPU_ARTIFACTS", "."))
# Of the largest logit: to bfloat16 the interpreter truncates, and a key near the middle of two integers may become either.
TOLERANCE = {"llama": 2e-5, "llama-int8": 2e-5, "qwen3": 0.08, "experts-int8": 5e-3}


@dataclass
class Pair:
    """The two runners; `fake` is the GPU of the first."""

    artifact: Artifact
    fake: FakeCuda
    runner: CudaRunner
    oracle: ReferenceRunner

    def run(self, plan: StepPlan) -> StepResult:
        return cuda_runs.run(self.runner, plan)

    def expected(self, plan: StepPlan) -> StepResult:
        self.oracle.submit(plan)
        return self.oracle.wait()

    def logits(self, plan: StepPlan) -> F32:
        return cuda_runs.logits(self.runner, self.artifact, plan)


def config(artifact: Artifact, **changes: Any) -> EngineConfig:
    pool = 40 * artifact.block_size * artifact.kv_bytes_per_token
    fields = {"max_num_seqs": 4, "max_num_batched_tokens": 96, "kv_memory_bytes": pool}
    return EngineConfig(**{**fields, **changes})


@contextmanager
def opened(name: str, *, checked: bool = True, **changes: Any) -> Iterator[Pair]:
    """An artifact of the session on a fake GPU; if `checked`, at the end, for its use as a GPU may be used."""
    artifact, reference = load_artifact(ARTIFACTS / name), load_artifact(ARTIFACTS / f"{name}-reference")
    fake = FakeCuda(artifact.path)
    groups = cache_groups(artifact.kv_groups)
    resolved = config(artifact, **changes).resolve(artifact.max_model_len, artifact.block_size, groups, 1 << 30)
    runner = CudaRunner(artifact, resolved, Driver(library=fake), owns_driver=True, poison=True)
    oracle = ReferenceRunner(reference, resolved)
    yield Pair(artifact, fake, runner, oracle)
    if not checked:
        return
    fake.check()
    runner.close()
    assert not fake.device and not fake.host
