"""The counters and gauges of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field

# The bounds of the histogram of tokens per step: a step is counted at the first bound that holds it.
STEP_TOKENS = (
    1,
    8,
    16,
    32,
    64,
    128,
    256,
    512,
    1024,
    2048,
    4096,
    8192,
)


@dataclass
class EngineStats:
    """The counters since the start, and gauges of the present; seconds are of the engine's thread."""

    num_waiting: int = 0
    num_running: int = 0
    waiting_ids: list[str] = field(default_factory=list)  # the requests with a sequence or a text that waits
    kv_usage: float = 0.0  # of the fullest KV group
    num_blocks: list[int] = field(default_factory=list)  # of each KV group, including block 0
    block_size: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_refused: int = 0  # requests whose objective could not be met
    length_error: float = 0.0  # of predicted answer lengths: the mean absolute logarithm of the ratio
    length_error_of_mean: float = 0.0  # the `length_error` of always predicting the mean
    cost_error: float = 0.0  # the mean relative error of the predicted seconds of steps
    num_freed_outside_window: int = 0  # blocks that left every window while their sequences ran
    num_evicted: int = 0  # blocks of the prefix cache that were evicted
    num_stored: int = 0  # blocks that were copied to the offload tier
    num_loaded: int = 0  # blocks that sequences found in the offload tier
    num_swapped: int = 0  # blocks of preempted sequences that were held until they were copied
    num_spilled: int = 0  # blocks of running sequences that were moved to the offload tier
    num_damaged: int = 0  # blocks of earlier runs that did not match their checksum
    offload_usage: float = 0.0  # of the offload tier's fullest KV group
    admitted_tokens: int = 0  # prompt tokens, counted at the first admission
    cached_tokens: int = 0  # the part of `admitted_tokens` that was in the prefix cache
    prompt_tokens: int = 0
    scheduled_tokens: int = 0
    output_tokens: int = 0  # that were made, also those in no answer: behind a stop string, or before an abort
    step_seqs: int = 0  # summed over all steps
    # numbers of steps, by STEP_TOKENS
    step_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))
    num_drafts: int = 0  # drafts of one or more tokens, each for a sequence in a step
    num_drafted: int = 0  # tokens of these
    num_accepted: int = 0  # the part of `num_drafted` that the model chose as well
    busy_seconds: float = 0.0  # with a step in flight
    finished: dict[str, int] = field(default_factory=dict)  # by reason: "stop", "length", "error", "abort"
    schedule_seconds: float = 0.0
    submit_seconds: float = 0.0
    wait_seconds: float = 0.0
    update_seconds: float = 0.0
