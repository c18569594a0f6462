"""The beam search that a body asks for, by vLLM's names: `use_beam_search`, with `n` or `best_of` beams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inferc.errors import RequestError, shown
from inferc.runtime.engine.beam_search import BeamSearchParams
from inferc.runtime.openai.fields import NOTHING
from inferc.runtime.step.sampling_params import MAX_N, SamplingParams, check_integer

BEAM_FIELDS = ("use_beam_search", "length_penalty", "early_stopping")
# The parameters of a request that a search has, too, or that change nothing of it.
_SHARED = (
    "n",
    "seed",
    "max_tokens",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "prompt_logprobs",
    "cache_salt",
    "cache_priority",
    "priority",
    "client",
)
_PLAIN = SamplingParams()


def beams_of(body: Mapping[str, Any]) -> BeamSearchParams | None:
    """Return the search that a body asks for, whose field types have been checked, or None.

    Raises RequestError for a value out of its range, for a stream, and for parameters of a search without one.
    """
    if not body.get("use_beam_search"):
        for name in BEAM_FIELDS[1:]:
            if body.get(name) not in (None, False, getattr(BeamSearchParams, name)):
                raise RequestError(
                    f"{name} is {shown(body[name])}, which a beam search reads; set use_beam_search to true, or leave"
                    f" {name} out"
                )
        return None
    if body.get("stream"):
        raise RequestError(
            "stream is true, and a beam search knows its answers when it ends; leave stream out, or use_beam_search"
        )
    given = {name: body[name] for name in BEAM_FIELDS[1:] if body.get(name) is not None}
    return search_of(body.get("n"), body.get("best_of"), given)


def search_of(n: int | None, width: int | None, given: Mapping[str, Any]) -> BeamSearchParams:
    """Return a search of so many beams, of which `n` answers are returned; given: the other parameters of the search.

    The length and the ends of answers are those of the request's SamplingParams.
    """
    answers = 1 if n is None else n
    beams = answers if width is None else width
    check_integer("best_of" if width is not None else "n", beams, 1, MAX_N)
    if beams < answers:
        raise RequestError(f"best_of {beams} is less than n {answers}; raise it, or leave it out")
    return BeamSearchParams(beams, **given)


def check_beside_beams(sampling: Mapping[str, Any], **forms: Any) -> None:
    """Raise RequestError for a request's sampling parameter that a beam search does not have.

    forms: what else of the request holds its answer to a form, by name; None: it does not.
    """
    for name, value in forms.items():
        if value is not None:
            raise RequestError(f"{name}: a beam search is held to no form; leave {name} out, or use_beam_search")
    for name, value in sampling.items():
        asks_nothing = value in NOTHING and name != "logprobs"
        if name in _SHARED or asks_nothing or value == getattr(_PLAIN, name) or (name == "temperature" and value == 0):
            continue
        raise RequestError(
            f"{name} is {shown(value)}, and a beam search takes the likeliest answers as they are; leave {name} out, or"
            " use_beam_search"
        )
