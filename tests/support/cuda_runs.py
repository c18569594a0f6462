"""Results of a step on a GPU, or on a fake one."""

from __future__ import annotations

import numpy as np

from inferc.runtime.runners.compiled import CompiledForCuda
from inferc.runtime.runners.cuda.runner import CudaRunner
from inferc.runtime.step.plan import F32, StepPlan, StepResult


def run(runner: CudaRunner, plan: StepPlan) -> StepResult:
    runner.submit(plan)
    result = runner.wait()
    assert result.error is None, result.error
    return result


def logits(runner: CudaRunner, artifact: CompiledForCuda, plan: StepPlan) -> F32:
    """Return the logits of a step that runs launch by launch, in the model's dtype: bfloat16 as its bits in uint16."""
    seen: list[F32] = []
    logits_id = artifact.program.observable[-1].id
    runner.set_observer(lambda entry, _, rows: seen.append(rows) if entry.id == logits_id else None)
    run(runner, plan)
    runner.set_observer(None)
    return np.concatenate(seen)
