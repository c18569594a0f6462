"""Requests of all kinds, and the engines of an artifact that answer them with drafts and without."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fake_drafts import AnyDrafts, ScriptedDrafter
from hypothesis import strategies as st

from inferc import LLM, SamplingParams, StructuredOutputs
from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.engine import load
from inferc.runtime.engine.engine import Engine
from inferc.runtime.engine.load import load_engine
from inferc.runtime.speculation.speculation import Speculation
from inferc.runtime.step.sequence import Sequence

PROMPTS = {
    "short": [5, 6],
    "repeats": [7, 8, 9, 10, 11, 7, 8, 9, 10, 11, 7, 8, 9],
    "long": list(range(20, 90)),
    "longer": [*range(20, 90), 3, 4],  # shares blocks with the one before
}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<call"],
        "tags": [
            {"type": "tag", "begin": "<call>", "content": {"type": "regex", "pattern": "[a-z]{2,9}"}, "end": "</call>"}
        ],
    },
}
FORMS: dict[str, dict[str, Any] | None] = {
    "free": None,
    "schema": {
        "json": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 6}, "kind": {"enum": ["small", "large"]}},
            "required": ["name", "kind"],
        },
        "disable_any_whitespace": True,
    },
    "regex": {"regex": r"[a-z]{10,14}-\d{4}"},
    "tool": {"structural_tag": TAG},
}
HOW: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.5, "seed": 7},
    "penalized": {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "top_k": 20},
    "ruled": {"temperature": 0.7, "seed": 5, "no_repeat_ngram_size": 2, "bad_words_ids": ((8, 9), (31, 32), (40,))},
    "narrowed": {"seed": 11, "typical_p": 0.8, "xtc_probability": 0.5, "xtc_threshold": 0.02},
    "penalized greedy": {"temperature": 0, "presence_penalty": 1.5, "logit_bias": {9: 2.0}},
}
# Rules may leave nothing to choose of a form, and then the request fails.
WITH_FORMS = [how for how in HOW if how != "ruled"]
OTHERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": 2},
    "minimum": {"min_tokens": 6},
    "stop id": {"stop_token_ids": tuple(range(0, 96, 7))},
    "two": {"n": 2},
    "no trigram": {"no_repeat_ngram_size": 3},
    "dry": {
        "dry_multiplier": 0.8,
        "dry_sequence_breakers": (),
        "dry_breaker_ids": (9, 30),
        "logit_bias": {40: 9.0, 41: 8.9, 42: 8.8},
    },
}


@dataclass(frozen=True)
class Asked:
    """A request of the product."""

    prompt: str
    form: str
    how: str
    others: str = "plain"
    max_tokens: int = 24
    adapter: str = ""

    @property
    def params(self) -> SamplingParams:
        form = FORMS[self.form]
        # Of a form an answer may not end before it has it, whatever min_tokens says.
        others = {} if self.others == "minimum" and form is not None else OTHERS[self.others]
        wanted = None if form is None else StructuredOutputs.of(form)
        own = {**HOW[self.how], **others, "adapter": self.adapter}
        return SamplingParams(max_tokens=self.max_tokens, structured_outputs=wanted, **own)


@dataclass
class Answered:
    """An engine's answer to a request: per output its tokens, how it ended, and log probabilities."""

    tokens: list[list[int]]
    reasons: list[str | None]
    logprobs: list[list[tuple[int, float, int]]]


def answer(engine: Engine, asked: dict[str, Asked], arrivals: dict[str, int] | None = None) -> dict[str, Answered]:
    """Run requests together, each from its step on, and return what each got."""
    found = {
        name: Answered([[] for _ in range(n)], [None] * n, [[] for _ in range(n)])
        for name, each in asked.items()
        for n in (each.params.n,)
    }
    waiting = dict(sorted(asked.items(), key=lambda item: (arrivals or {}).get(item[0], 0)))
    for step in range(10_000):
        for name in [name for name in waiting if (arrivals or {}).get(name, 0) <= step]:
            each = waiting.pop(name)
            engine.add_request(name, PROMPTS[each.prompt], each.params)
        if not engine.has_work and not waiting:
            assert not engine.grammars.take_invalid()
            return found
        for output in engine.step():
            own = found[output.request_id]
            own.tokens[output.index] += output.token_ids
            own.reasons[output.index] = output.finish_reason
            own.logprobs[output.index] += [(one.token_id, one.logprob, one.rank) for one in output.logprobs or ()]
        engine.scheduler.check_integrity()
    raise AssertionError("a sequence starves")


class Machines:
    """The engines of one artifact: one without drafts, and some whose drafts are any."""

    VARIANTS: tuple[dict[str, Any], ...] = (
        {},
        {"prefix_cache": False, "num_threads": 2},
        {"max_num_batched_tokens": 12, "max_num_seqs": 4},
        {"kv_blocks": 6, "overcommit": True},
    )

    def __init__(self, path: Path, variants: tuple[dict[str, Any], ...] = VARIANTS, **common: Any) -> None:
        """Open the engines. common: options of all of them."""
        self._known: dict[Asked, Answered] = {}
        self.is_reference = False  # it computes with torch, whose last bits depend on the batch
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(load, "make_speculation", lambda *_: None)
            self.plain = load_engine(path, **{"num_threads": 1, "max_num_seqs": 2, **common})
        self.drafter = ScriptedDrafter(self._go_on, self.plain.model.vocab_size)
        artifact = load_artifact(path)
        block_bytes = artifact.block_size * artifact.kv_bytes_per_token
        self._asked: dict[str, Asked] = {}
        self.engines = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(load, "make_speculation", lambda config, *_: AnyDrafts(self.drafter, config.max_num_seqs))
            for variant in variants:
                options = {"num_threads": 1, "max_num_seqs": 8, **common, **variant}
                if "kv_blocks" in options:
                    options["kv_memory_bytes"] = options.pop("kv_blocks") * block_bytes
                self.engines.append(load_engine(path, speculate="ngram", **options))

    def alone(self, asked: Asked) -> Answered:
        """Return what a request gets alone, without drafts."""
        if asked not in self._known:
            self._known[asked] = answer(self.plain, {"alone": asked})["alone"]
        return self._known[asked]

    def together(self, variant: int, asked: list[Asked], steps: list[int]) -> list[Answered]:
        """Return what requests get together, with drafts; steps: when each arrives."""
        names = [f"{number}" for number in range(len(asked))]
        self._asked = dict(zip(names, asked, strict=True))
        found = answer(self.engines[variant], self._asked, dict(zip(names, steps, strict=True)))
        return [found[name] for name in names]

    def _go_on(self, seq: Sequence, known: list[int], count: int) -> list[int]:
        tokens = self.alone(self._asked[seq.request_id]).tokens[seq.index]
        done = len(known) - seq.prompt_len
        return tokens[done : done + count]

    def close(self) -> None:
        for engine in (self.plain, *self.engines):
            engine.close()


ADAPTERS = ("first", "second")


def requests_of(*adapters: str) -> st.SearchStrategy[Asked]:
    """Return a strategy of requests, with one of these adapters or none."""
    parts = (st.sampled_from(sorted(each)) for each in (PROMPTS, FORMS, HOW, OTHERS))
    return st.builds(Asked, *parts, max_tokens=st.integers(1, 24), adapter=st.sampled_from(["", *adapters]))


def always_draft(of: LLM | Engine) -> Speculation:
    """Draft several tokens at once whatever they cost, which nobody knows of models as small as these."""
    engine: Engine = of if isinstance(of, Engine) else of._client._engine
    assert engine.speculation is not None
    times = engine.speculation.times
    times.observe = lambda num_tokens, seconds: None  # type: ignore[method-assign]
    engine.speculation.observe_waiting = lambda seconds: None  # type: ignore[method-assign]
    times._drift = 1e9
    return engine.speculation
