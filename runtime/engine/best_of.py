"""The best of several outputs: `best_of` sequences are computed, and the likeliest of them returned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from inferc.runtime.engine.request_output import CompletionOutput
from inferc.runtime.step.sampling_params import SamplingParams, changed


def computed(params: SamplingParams) -> SamplingParams:
    """Return the parameters of what is computed for a request, which `best` then chooses from."""
    if params.best_of is None:
        return params
    return changed(params, n=params.best_of, best_of=None, logprobs=params.logprobs or 0)


def best(outputs: Sequence[CompletionOutput], params: SamplingParams) -> list[CompletionOutput]:
    """Return what a request with these parameters gets of the outputs that were computed, the best first.

    The best has the highest log probability of all of its tokens together; of equal ones the earlier goes first.
    """
    if params.best_of is None:
        return list(outputs)
    found = sorted(outputs, key=lambda output: -(output.cumulative_logprob or 0.0))[: params.n]
    has_rows = params.logprobs is not None
    return [
        replace(each, index=index, logprobs=each.logprobs if has_rows else None) for index, each in enumerate(found)
    ]
