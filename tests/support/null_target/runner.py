"""The null target at work: a runner whose every step samples token 0."""

from collections import deque

import numpy as np

from inferc.runtime.artifact.load import Artifact
from inferc.runtime.runners.api import Capability, OpenedRunner, RunnerRequest
from inferc.runtime.step.plan import F32, I32, StepPlan, StepResult


class NullRunner:
    def __init__(self) -> None:
        self._plans: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def wait(self) -> StepResult:
        return StepResult(np.zeros(len(self._plans.popleft().logits_rows), np.int32))

    def reset_slot(self, slot: int, prompt_ids: I32 | None, output_ids: I32 | None = None) -> None: ...

    def score(self, plan: StepPlan, target_ids: I32) -> tuple[F32, I32]:
        return np.zeros(len(target_ids), np.float32), np.zeros(len(target_ids), np.int32)

    def close(self) -> None: ...


class NullRunnerFactory:
    def capabilities(self, artifact: Artifact) -> frozenset[Capability]:
        return frozenset({"prefix_cache"})

    def open(self, request: RunnerRequest) -> OpenedRunner:
        artifact = request.artifact
        return OpenedRunner(
            NullRunner(), request.config.resolve(artifact.max_model_len, artifact.block_size, request.groups)
        )


NULL_RUNNER = NullRunnerFactory()
