"""The perplexity of a text: how well a model predicts it.

The procedure, which other tools can repeat: the text is tokenized once by the model's tokenizer (with BOS if it adds
one) and cut into windows of `window` tokens that do not overlap. Every token of a window except the first is scored
given those before it in the window. Perplexity is e to the mean negative log probability over all windows.
"""

from __future__ import annotations

import math
import queue
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inferc.errors import RequestError
from inferc.kv_groups import CacheLimits, cache_groups, pools_bytes, pools_for_all
from inferc.runtime.artifact.load import Artifact
from inferc.runtime.engine.loop import EngineClient, Event, Failed, Scored

WINDOW = 1024
IN_FLIGHT = 2  # windows given to the engine at once, so it never waits for the next one


@dataclass(frozen=True)
class Perplexity:
    """The perplexity of a text; nll is the mean negative log probability in nats of the `tokens` scored tokens."""

    perplexity: float
    nll: float
    tokens: int
    window: int


def kv_cache_bytes(artifact: Artifact, window: int) -> int:
    """Return the bytes of KV cache that the windows in flight need, including the reserved block."""
    limits = CacheLimits(artifact.block_size, window, IN_FLIGHT + 1, window)
    groups = cache_groups(artifact.whole_kv_groups)
    return pools_bytes(groups, limits, pools_for_all(groups, limits))


def perplexity(
    client: EngineClient,
    token_ids: Sequence[int],
    window: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Perplexity:
    """Score `token_ids`, a tokenized text. progress: called with (windows done, number of windows).

    Raises RequestError if there are fewer than two tokens.
    """
    windows = deque(token_ids[start : start + window] for start in range(0, len(token_ids), window))
    if windows and len(windows[-1]) < 2:  # a window of one token has nothing to score
        windows.pop()
    if not windows:
        raise RequestError(f"the text has {len(token_ids)} tokens; a perplexity needs 2 or more")
    total, num_open = len(windows), 0
    answers: queue.SimpleQueue[Event] = queue.SimpleQueue()
    logprobs: dict[str, list[float]] = {}
    while windows or num_open:
        while windows and num_open < IN_FLIGHT:
            client.score(windows.popleft(), answers.put)
            num_open += 1
        event = answers.get()
        num_open -= 1
        if isinstance(event, Failed):
            raise event.error
        assert isinstance(event, Scored), event
        logprobs[event.request_id] = event.score.logprobs
        progress(len(logprobs), total)
    # An exact sum, so the result does not depend on the order in which windows finished.
    count = sum(map(len, logprobs.values()))
    nll = -math.fsum(value for values in logprobs.values() for value in values) / count
    return Perplexity(math.exp(nll), nll, count, window)
