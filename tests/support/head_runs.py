"""Engines whose head drafts as often as it can, and the drafts that it makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from speculated import always_draft

from inferc import SamplingParams
from inferc.runtime.engine.engine import Engine
from inferc.runtime.speculation.drafter import Guesses
from inferc.runtime.speculation.forced import ForcedDrafter
from inferc.runtime.speculation.head import HeadDrafter


@dataclass
class Drafted:
    """A draft of a head, and the tokens that were known before it."""

    tokens: list[int]
    ids: list[int]


def drafter_of(engine: Engine) -> HeadDrafter:
    assert engine.speculation is not None and isinstance(engine.speculation.drafter, ForcedDrafter)
    found = engine.speculation.drafter._other
    assert isinstance(found, HeadDrafter)
    return found


def watched(engine: Engine) -> list[Drafted]:
    """Have an engine draft as often as it can, and return the list to which all drafts are added."""
    speculation = always_draft(engine)
    speculation._acceptance.learn = lambda *_: None  # type: ignore[method-assign]
    drafter, found = drafter_of(engine), list[Drafted]()
    guess = drafter.guess

    def kept(batch: Any, slots: Any, counts: Any) -> list[Guesses]:
        drafts = guess(batch, slots, counts)
        for slot, each in zip(slots, drafts, strict=True):
            found.append(Drafted(batch.tokens[slot, : batch.num_known[slot]].tolist(), each.token_ids))
        return drafts

    drafter.guess = kept  # type: ignore[method-assign]
    return found


def run(engine: Engine, prompts: list[list[int]], max_tokens: int = 40) -> list[list[int]]:
    """Answer prompts greedily, one beside the other."""
    for name, prompt in enumerate(prompts):
        engine.add_request(str(name), prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0))
    found: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for output in engine.step():
            found[int(output.request_id)] += output.token_ids
        engine.scheduler.check_integrity()
    return found
