"""Programs on a model that answers when a test says so: what runs at the same time, what ends what, and messages."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fake_endpoint import END, FakeEndpoint
from hypothesis import given
from hypothesis import strategies as st
from serving import ENV

from inferc import InfercError, RequestError, gen, program, select, vote
from inferc.runtime.programs.expressions import By, best
from inferc.runtime.programs.program import Program
from inferc.runtime.programs.scope import Ended
from inferc.runtime.programs.state import State
from inferc.runtime.programs.vote import is_decided


def echo(prompt: str) -> str:
    return f"<{prompt[-1]}>"


def check_nothing_is_left(endpoint: FakeEndpoint) -> None:
    assert all(request.is_over for request in endpoint.opened)
    assert not [each for each in threading.enumerate() if each.name.startswith(("inferc-program", "inferc-select"))]


@program
def two_steps(s: State, topic: str, last: str = "?") -> int:
    """Ask twice."""
    s += "about "
    s += topic
    s += gen("first", stop=";", temperature=0.5)
    s += last
    s += gen("second")
    s += "."
    return len(s["second"])


def test_a_program_appends_in_order_and_only_adds_tokens() -> None:
    endpoint = FakeEndpoint(echo)
    s = two_steps.run(endpoint, topic="x")
    assert s.text == "about x<x>?<?>." and s.result == 3
    assert s.variables == {"first": "<x>", "second": "<?>"} and "first" in s and "third" not in s
    assert [request.prompt for request in endpoint.opened] == ["about x", "about x<x>?"]
    assert [dict(request.sampling) for request in endpoint.opened] == [{"stop": ";", "temperature": 0.5}, {}]
    assert s.token_ids == list(s.text.encode()), "without the tokens that ended the answers"
    info: Any = s.info("first")
    assert info.token_ids == (*b"<x>", END) and (info.num_prompt_tokens, info.finish_reason) == (7, "stop")
    assert two_steps.name == "two_steps" and two_steps.__doc__ == "Ask twice."
    check_nothing_is_left(endpoint)


def test_programs_call_programs() -> None:
    @program
    def outer(s: State) -> None:
        s += "1"
        s["length"] = two_steps(s, "y", last="!")
        s += gen()

    s = outer.run(FakeEndpoint(echo))
    assert s.text == "1about y<y>!<!>.<.>" and s.variables == {"first": "<y>", "second": "<!>", "length": 3}


def test_branches_run_at_the_same_time() -> None:
    """None is answered before all are open."""

    @program
    def branches(s: State) -> list[str]:
        s += "ab"
        s["kept"] = "k"
        forks = s.fork(4)
        for index, branch in enumerate(forks):
            branch += str(index)
            branch += gen("x", seed=7)
        forks[0]["alone"] = True
        assert forks.join() is s
        s += f" {s['x']}"
        return [*[branch.text for branch in forks], *forks["x"]]

    endpoint = FakeEndpoint(echo, meet=4)
    s = branches.run(endpoint)
    assert s.result == [f"ab{n}<{n}>" for n in range(4)] + [f"<{n}>" for n in range(4)]
    assert s.text == f"ab {[f'<{n}>' for n in range(4)]}" and s["alone"] == [True, None, None, None]
    assert s["kept"] == "k", "what no branch set stays"
    assert sorted(request.sampling["seed"] for request in endpoint.opened) == [7, 8, 9, 10]
    check_nothing_is_left(endpoint)


def test_functions_run_on_branches_at_the_same_time() -> None:
    @program
    def branches(s: State) -> list[str]:
        return s.fork(3).each(lambda branch: (branch.__iadd__(gen("x")))["x"] + branch["x"])

    s = branches.run(FakeEndpoint(lambda _: "<>", meet=3))
    assert s.result == ["<><>"] * 3


def test_a_batch_runs_at_the_same_time_and_keeps_its_order() -> None:
    @program
    def one(s: State, letter: str) -> None:
        s += letter
        s += gen("x")

    endpoint = FakeEndpoint(echo, meet=5)
    assert [s["x"] for s in one.batch(endpoint, [{"letter": each} for each in "abcde"])] == [f"<{e}>" for e in "abcde"]
    assert not one.batch(endpoint, [])
    check_nothing_is_left(endpoint)


def failing(prompt: str) -> str | Exception | None:
    return RequestError("broken") if prompt.endswith("1") else None


def test_an_error_in_a_branch_ends_the_others() -> None:
    """Requests that would never be answered are cancelled."""

    @program
    def branches(s: State) -> None:
        forks = s.fork(3)
        for index, branch in enumerate(forks):
            branch += f"{index}"
            branch += gen("x")
        forks.join()

    endpoint = FakeEndpoint(failing, meet=3)
    with pytest.raises(RequestError, match=r'^test_programs.py:\d+: gen\("x"\): broken$'):
        branches.run(endpoint)
    check_nothing_is_left(endpoint)
    assert all(request.cancelled.is_set() for request in endpoint.opened if not request.prompt.endswith("1"))


@pytest.mark.parametrize("is_caught", [False, True])
def test_an_error_of_branches_that_nobody_waits_for_is_told(is_caught: bool) -> None:
    @program
    def branches(s: State) -> str:
        (branch,) = s.fork(1)
        branch += "1"
        branch += gen("x")
        try:
            if is_caught:
                return str(branch["x"])
        except RequestError as error:
            return str(error)
        return ""

    if is_caught:
        assert branches.run(FakeEndpoint(failing)).result.endswith("broken")
    else:
        with pytest.raises(RequestError, match="broken"):
            branches.run(FakeEndpoint(failing))


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_an_error_of_the_function_ends_what_runs(error: BaseException) -> None:
    is_asked = threading.Event()

    @program
    def fails(s: State, raised: BaseException) -> None:
        s += "a"
        for branch in s.fork(2):
            branch += gen("x")
        assert is_asked.wait(30)
        raise raised

    endpoint = FakeEndpoint(lambda _: is_asked.set(), meet=2)
    with pytest.raises(type(error)) as raised:
        fails.run(endpoint, raised=error)
    assert raised.value is error
    check_nothing_is_left(endpoint)


def test_an_error_in_a_batch_ends_all_of_it() -> None:
    @program
    def one(s: State, letter: str) -> None:
        s += letter
        s += gen("x")

    endpoint = FakeEndpoint(failing, meet=3)
    with pytest.raises(RequestError, match="broken"):
        one.batch(endpoint, [{"letter": each} for each in "012"])
    check_nothing_is_left(endpoint)


def test_a_vote_ends_when_no_other_answer_can_win() -> None:
    """Three of five answer; the others never would."""

    @program
    def ask(s: State) -> Any:
        s += "q"
        numbers = iter(range(5))

        def body(branch: State) -> None:
            branch += str(next(numbers))
            branch += gen("x")

        return vote(s, 5, body, lambda branch: branch["x"])

    endpoint = FakeEndpoint(lambda prompt: "yes" if prompt[-1] in "012" else None, meet=5)
    s = ask.run(endpoint)
    assert s.result.answer == "yes" and s.result.counts == {"yes": 3} and s.text == "q"
    assert sum(request.cancelled.is_set() for request in endpoint.opened) == 2
    check_nothing_is_left(endpoint)


def test_a_vote_takes_of_equals_the_lowest_branch_and_counts_no_none() -> None:
    @program
    def ask(s: State, answers: list[Any]) -> Any:
        of_branch: dict[State, Any] = {}
        lock = threading.Lock()

        def body(branch: State) -> Any:
            with lock:
                return of_branch.setdefault(branch, answers[branch._seed_offset])

        return vote(s, len(answers), body)

    endpoint = FakeEndpoint(echo)
    assert ask.run(endpoint, answers=["b", "a", "a", "b", None]).result.answer == "b"
    assert ask.run(endpoint, answers=[None, None]).result.answer is None
    with pytest.raises(RequestError, match=r"test_programs.py:\d+: vote: a branch's answer is \[\]; expected a text"):
        ask.run(endpoint, answers=[[]])


@given(st.lists(st.sampled_from([None, "a", "b", "c"]), min_size=1, max_size=9), st.data())
def test_a_decided_vote_stays_decided(answers: list[str | None], data: st.DataObject) -> None:
    counted = data.draw(st.integers(0, len(answers)))
    if is_decided(list(answers[:counted]), len(answers)):
        votes = [each for each in answers if each is not None]
        most = max(set(votes), key=votes.count)
        early = [each for each in answers[:counted] if each is not None]
        assert most == max(set(early), key=early.count)
        assert all(votes.count(other) < votes.count(most) for other in set(votes) - {most})


def test_pieces_come_as_they_are_appended() -> None:
    running = two_steps.stream(FakeEndpoint(echo), topic="x")
    pieces = list(running)
    assert [(piece.name, piece.text) for piece in pieces] == [
        ("", "about "),
        ("", "x"),
        *[("first", letter) for letter in "<x>"],
        ("", "?"),
        *[("second", letter) for letter in "<?>"],
        ("", "."),
    ]
    assert running.state["second"] == "<?>" and running.state.result == 3
    with pytest.raises(RequestError, match="this run was read already; call stream again"):
        next(iter(running))


def test_leaving_the_loop_over_pieces_ends_the_program() -> None:
    endpoint = FakeEndpoint(lambda _: None)
    for piece in two_steps.stream(endpoint, topic="x"):
        assert piece.text == "about "
        break
    check_nothing_is_left(endpoint)


def test_an_error_comes_where_the_pieces_are_read() -> None:
    endpoint = FakeEndpoint(failing)
    seen = []
    with pytest.raises(RequestError, match="broken"):
        for piece in two_steps.stream(endpoint, topic="1"):
            seen.append(piece.text)
    assert seen == ["about ", "1"]
    check_nothing_is_left(endpoint)


def test_a_variable_is_read_as_it_grows() -> None:
    @program
    def reads(s: State) -> list[str]:
        s += "a"
        s += gen("x")
        s += "b"
        return list(s.stream("x"))

    assert reads.run(FakeEndpoint(echo)).result == ["<", "a", ">"]


def test_choices_are_scored_behind_the_text() -> None:
    """The first one alone, so that the others find what is before them in the cache."""

    @program
    def chooses(s: State) -> None:
        s += "ab"
        s += select("x", ["za", "b", "c"])

    endpoint = FakeEndpoint(echo)
    s = chooses.run(endpoint)
    assert s["x"] == "b" and s.text == "abb" and s.token_ids == list(b"abb")
    assert endpoint.scored[0] == ("abza", 2) and sorted(endpoint.scored[1:]) == [("abb", 2), ("abc", 2)]
    info: Any = s.info("x")
    assert info.logprobs == ((-122.0, -97.0), (-98.0,), (-99.0,)) and info.choices == ("za", "b", "c")


@pytest.mark.parametrize(
    ("by", "scores", "ids", "index"),
    [
        ("mean", [[-1, -9], [-4]], [[1, 2], [3]], 1),
        ("mean", [[-1, -5], [-4]], [[1, 2], [3]], 0),
        ("sum", [[-1, -5], [-4]], [[1, 2], [3]], 1),
        ("sum", [[-4], [-4]], [[1], [2]], 0),
        ("tokens", [[-1, -9], [-2, -1]], [[1, 2], [3, 4]], 0),
        ("tokens", [[-1, -9], [-1, -3], [-2]], [[1, 2], [1, 4], [5]], 1),
        ("tokens", [[-1, -9], [-1]], [[1, 2], [1]], 1),
    ],
)
def test_the_best_choice(by: By, scores: Any, ids: Any, index: int) -> None:
    assert best(scores, ids, by) == index


@given(st.text("ab<> é", max_size=8), st.integers(0, 8), st.booleans())
def test_what_is_kept_of_an_answer_is_its_text(answer: str, cut: int, is_ended: bool) -> None:
    """Return what was generated, up to the token in which it was cut."""
    endpoint = FakeEndpoint(echo)
    ids = [*answer.encode(), *([END] if is_ended else [])]
    text = answer if is_ended else answer[:cut]
    kept = endpoint.kept(ids, text, ())
    assert kept == list(text.encode())


STEPS = st.recursive(
    st.one_of(st.text("ab é", max_size=3), st.just("GEN"), st.just("SELECT"), st.just("READ")),
    lambda steps: st.lists(steps, max_size=5),
    max_leaves=12,
)


@given(st.lists(STEPS, max_size=6))
def test_tokens_are_only_added_whatever_is_appended(steps: list[Any]) -> None:
    """Each prompt begins with what its state had before, in branches too, and the tokens are those of the text."""

    def take(s: State, steps: list[Any]) -> None:
        for step in steps:
            before = s.token_ids if step == "READ" else None
            if isinstance(step, list):
                for branch in s.fork(2):
                    take(branch, step)
            elif step == "GEN":
                s += "."
                s += gen("x")
            elif step == "SELECT":
                s += ":"
                s += select("y", ["é", "a"])
            elif before is None:
                s += step
            else:
                assert s.token_ids[: len(before)] == before == list(s.text.encode())

    @program
    def runs(s: State) -> None:
        take(s, steps)

    endpoint = FakeEndpoint(echo)
    s = runs.run(endpoint)
    assert s.token_ids == list(s.text.encode())
    prompts = [request.prompt for request in endpoint.opened]
    assert all(prompt.endswith(".") for prompt in prompts)
    check_nothing_is_left(endpoint)


def errors_of(function: Callable[[State], Any]) -> str:
    with pytest.raises(InfercError) as raised:
        program(function).run(FakeEndpoint(echo))
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda s: s["x"], 'the program has no variable "x"'),
        (lambda s: s.__iadd__(5), "expected a text, gen(…) or select(…), found 5"),
        (lambda s: s.user(None), "user: expected a text, found null"),
        (lambda s: s.assistant(gen("x"), 7), "expected a text, gen(…) or select(…), found 7"),
        (lambda s: s.fork(0), "fork: n is 0; expected 1 to 1024"),
        (lambda s: gen("x", n=2), 'gen("x"): n is not for a program\'s generation; fork the state, or vote'),
        (lambda s: gen("x", top_p=7), 'gen("x"): top_p is 7; expected a value in (0.0, 1.0]'),
        (
            lambda s: gen("x", tempreature=1),
            'gen("x"): unknown sampling parameter tempreature; did you mean temperature',
        ),
        (lambda s: gen("x", choices=["a", "b"]), "choices is not for a program's generation; select takes them"),
        (lambda s: gen("x", json={}, regex="a"), "structured_outputs: expected one of"),
        (lambda s: gen(5), "gen(5): a variable's name is a text, found 5"),  # type: ignore[arg-type]
        (lambda s: select("x", ["a"]), 'select("x"): choices: expected a list of two texts or more, found ["a"]'),
        (lambda s: select("x", ["a", ""]), 'choices[1] is ""; expected a text that is not empty'),
        (lambda s: select("x", ["a", "a"]), 'choices[1] is "a", which is there twice; leave one out'),
        (lambda s: select("x", ["a", "b"], by="men"), 'by is "men"; did you mean mean?'),  # type: ignore[arg-type]
        (lambda s: s.__iadd__(select("x", ["a", "b"])), 'select("x"): there is no text to choose by; append some'),
        (lambda s: s.info("x"), 'the program has no variable "x"'),
    ],
)
def test_a_message_names_the_line_and_what_is_wrong(function: Callable[[State], Any], message: str) -> None:
    found = errors_of(function)
    assert message in found and found.startswith("test_programs.py:")


def test_names_near_a_variable_are_told() -> None:
    def asks(s: State) -> None:
        s["answer"] = 5
        _ = s["anwser"]

    assert errors_of(asks).endswith('the program has no variable "anwser"; did you mean answer?')

    def info(s: State) -> None:
        s["answer"] = 5
        s.info("answer")

    assert errors_of(info).endswith('"answer" was neither generated nor selected')


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: two_steps.run(FakeEndpoint(echo)), "two_steps: missing a required argument: 'topic'"),
        (lambda: two_steps.stream(FakeEndpoint(echo), topc=1), "two_steps: missing a required argument: 'topic'"),
        (lambda: two_steps.run("a folder", topic="x"), 'an inferc.LLM or an inferc.client.Client, found "a folder"'),
        (lambda: two_steps.batch(FakeEndpoint(echo), [{"topic": "x"}, {}]), "two_steps: args[1]: missing a required"),
        (lambda: two_steps.batch(FakeEndpoint(echo), ["x"]), 'args[0]: expected a mapping of arguments, found "x"'),  # type: ignore[list-item]
        (lambda: two_steps.batch(FakeEndpoint(echo), [], num_at_once=0), "num_at_once is 0; expected at least 1"),
    ],
)
def test_what_a_program_is_not_run_with(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(RequestError) as raised:
        call()
    assert message in str(raised.value)


def test_the_state_of_a_program_that_has_ended_takes_nothing_more() -> None:
    s = two_steps.run(FakeEndpoint(echo), topic="x")
    with pytest.raises(InfercError, match="the program has ended, and its state takes nothing more"):
        s += "more"
    assert s.text.startswith("about x")


def test_the_state_of_a_program_that_failed_tells_why() -> None:
    running = two_steps.stream(FakeEndpoint(failing), topic="1")
    with pytest.raises(RequestError, match="broken"):
        list(running)
    with pytest.raises(RequestError, match="broken"):
        _ = running.state["first"]


def test_a_program_of_a_class_that_is_called() -> None:
    class Asks:
        def __call__(self, s: State) -> None:
            s += "a"
            s += gen("x")

    made = program(Asks())
    assert isinstance(made, Program) and made.run(FakeEndpoint(echo))["x"] == "<a>"
    assert issubclass(Ended, InfercError)


def test_importing_inferc_imports_no_programs() -> None:
    code = "import sys, inferc; assert not [name for name in sys.modules if 'programs' in name or 'numpy' in name]"
    subprocess.run([sys.executable, "-c", code], check=True, env=ENV)
