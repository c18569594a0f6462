"""The self-consistency of a program: the answer that most of several branches give."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from inferc.errors import RequestError, shown
from inferc.runtime.programs.expressions import caller, located
from inferc.runtime.programs.scope import Ended
from inferc.runtime.programs.state import State


@dataclass(frozen=True)
class Votes:
    """The outcome of a vote.

    answer: None if no branch gave one. counts: the votes for each answer that were cast before it was decided.
    """

    answer: Any
    counts: dict[Hashable, int]


def vote(
    state: State, n: int, body: Callable[[State], Any], extract: Callable[[State], Hashable] | None = None
) -> Votes:
    """Return the answer that most of n branches of a state give; of equals, that of the lowest branch.

    body: appends to a branch, each in a thread. extract: returns a branch's answer, None for none; without it, what
    `body` returned. Once no other answer can win any more, the branches that still run are ended. The answer is the
    same whichever branches are first. The state stays as it was.

    Source: Wang et al. 2022, "Self-Consistency Improves Chain of Thought Reasoning in Language Models".
    """
    forks, lock, where = state.fork(n), threading.Lock(), f"{caller()}: vote"
    decided = threading.Event()
    answers: dict[int, Hashable] = {}  # by the number of the branch
    of_branch = {id(branch): index for index, branch in enumerate(forks)}

    def cast(branch: State) -> None:
        returned = body(branch)
        answer = returned if extract is None else extract(branch)
        if not isinstance(answer, Hashable):
            raise located(RequestError(f"a branch's answer is {shown(answer)}; expected a text or a number"), where)
        with lock:
            answers[of_branch[id(branch)]] = answer
            if is_decided(list(answers.values()), n):
                decided.set()
                forks.scope.end(Ended("the vote is decided without this branch"))

    try:
        forks.each(cast)
    except Ended:
        if not decided.is_set():  # the program itself has ended
            raise
    with lock:
        counts = counted([answers[index] for index in sorted(answers)])
    return Votes(max(counts, key=lambda answer: counts[answer], default=None), counts)


def counted(answers: list[Hashable]) -> dict[Hashable, int]:
    """Return how many votes each answer has, in the order in which they came."""
    counts: dict[Hashable, int] = {}
    for answer in answers:
        if answer is not None:
            counts[answer] = counts.get(answer, 0) + 1
    return counts


def is_decided(answers: list[Hashable], n: int) -> bool:
    """Return whether no other answer can have as many votes as the first, whatever the other branches answer."""
    left = n - len(answers)
    most, second = [*sorted(counted(answers).values(), reverse=True), 0, 0][:2]
    return left > 0 and most > second + left
