"""The expressions that a program appends to its state: `gen` and `select`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from inferc.errors import InfercError, RequestError, nearest, shown
from inferc.runtime.step.sampling_params import from_request
from inferc.runtime.step.structured_outputs import StructuredOutputs

By = Literal["mean", "sum", "tokens"]
FORMS = ("json", "json_object", "regex", "choice", "grammar")
# Parameters of a request that a generation within a program does not have.
ELSEWHERE = {
    "n": "fork the state, or vote",
    "best_of": "fork the state, or vote",
    "logprobs": "select tells the log probabilities of its choices",
    "prompt_logprobs": "select tells the log probabilities of its choices",
    "tap": "LLM.generate keeps values",
    "skip_special_tokens": "a program's text has special tokens only where it writes them",
    "choices": "select takes them, and choice holds a generation to one of some texts",
    "json_schema": "give json",
    "structured_outputs": f"give {', '.join(FORMS)}",
}
Error = TypeVar("Error", bound=InfercError)


@dataclass(frozen=True)
class Gen:
    """A generation; sampling: the fields of SamplingParams that were given."""

    name: str
    sampling: Mapping[str, Any]

    def __str__(self) -> str:
        return f"gen({shown(self.name)})"


@dataclass(frozen=True)
class Select:
    """A choice among texts."""

    name: str
    choices: tuple[str, ...]
    by: By
    cache_salt: str = ""

    def __str__(self) -> str:
        return f"select({shown(self.name)})"


def gen(
    name: str = "",
    *,
    max_tokens: int | None = None,
    stop: str | Sequence[str] | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    json: Any = None,
    regex: str | None = None,
    choice: Sequence[str] | None = None,
    grammar: str | None = None,
    **sampling: Any,
) -> Gen:
    """Return a generation to append to a program's state; its text is the variable `name`.

    json, regex, choice, grammar, json_object: the form that it is held to, as in StructuredOutputs. sampling: further
    fields of SamplingParams. What is not given is the model's default, as for LLM.generate. Raises RequestError for
    what SamplingParams refuses.
    """
    given: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, **sampling}
    given["stop"] = stop if stop is None or isinstance(stop, str) else tuple(stop)
    forms = {"json": json, "regex": regex, "choice": choice, "grammar": grammar}
    forms["json_object"] = given.pop("json_object", None)
    try:
        _check_name(name)
        for field, hint in ELSEWHERE.items():
            if field in given:
                raise RequestError(f"{field} is not for a program's generation; {hint}")
        forms = {field: value for field, value in forms.items() if value is not None}
        if forms:
            given["structured_outputs"] = StructuredOutputs(**forms, label=" and ".join(forms))
        given = {field: value for field, value in given.items() if value is not None}
        from_request(given)
    except RequestError as error:
        raise located(error, f"{caller()}: gen({shown(name)})") from None
    return Gen(name, given)


def select(name: str = "", choices: Sequence[str] = (), *, by: By = "mean", cache_salt: str = "") -> Select:
    """Return a choice to append to a program's state: the likeliest of some texts, given the text so far.

    by: "mean", the mean log probability of a choice's tokens; "sum", that of the whole choice, which favours short
    ones; "tokens", token by token: the likeliest first token, among its choices the likeliest second one, and so on.
    Of equals, the first is taken. Only requests with the same cache_salt share cached prefixes. Raises RequestError for
    fewer than two choices, empty or equal ones.
    """
    where = f"{caller()}: select({shown(name)})"
    try:
        _check_name(name)
        if isinstance(choices, str) or not isinstance(choices, Sequence) or len(choices) < 2:
            raise RequestError(f"choices: expected a list of two texts or more, found {shown(choices)}")
        for index, each in enumerate(choices):
            if not isinstance(each, str) or not each:
                raise RequestError(f"choices[{index}] is {shown(each)}; expected a text that is not empty")
            if each in choices[:index]:
                raise RequestError(f"choices[{index}] is {shown(each)}, which is there twice; leave one out")
        if by not in get_args(By):
            raise RequestError(f"by is {shown(by)}; {nearest(str(by), get_args(By))}")
    except RequestError as error:
        raise located(error, where) from None
    return Select(name, tuple(choices), by, cache_salt)


def best(scores: Sequence[Sequence[float]], token_ids: Sequence[Sequence[int]], by: By) -> int:
    """Return the index of the choice that `by` takes.

    scores, token_ids: those of each choice's tokens, given the text and its tokens before.
    """
    everyone = range(len(scores))
    if by != "tokens":
        return max(everyone, key=lambda index: sum(scores[index]) / (len(scores[index]) if by == "mean" else 1))
    left, place = list(everyone), 0
    while len(left) > 1:
        ended = [index for index in left if len(scores[index]) == place]
        if ended:  # a choice with which others begin
            return ended[0]
        token = token_ids[max(left, key=lambda index: scores[index][place])][place]
        left = [index for index in left if token_ids[index][place] == token]
        place += 1
    return left[0]


def caller() -> str:
    """Return the line of the program that is calling: its file's name and the line's number."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("inferc.runtime.programs."):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.replace(chr(92), '/').rpartition('/')[2]}:{frame.f_lineno}"


def located(error: Error, where: str) -> Error:
    """Return the same error, whose message says where in the program it is from."""
    error.args = (f"{where}: {error}",)
    return error


def _check_name(name: Any) -> None:
    if not isinstance(name, str):
        raise RequestError(f"a variable's name is a text, found {shown(name)}")
