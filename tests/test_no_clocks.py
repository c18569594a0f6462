"""No test sleeps where it could wait for an event, and none reads a clock: what that tells depends on the machine."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FILES = [path for path in sorted(TESTS.rglob("*.py")) if path != Path(__file__)]
# Timers run on virtual time instead (tests/support/virtual_time.py), or on a clock that the test makes; what another
# process does is waited for by `wait_until` (tests/support/serving.py); a limit is the timeout of what is waited for.
CLOCKS = {
    "threading.Timer",
    "time.sleep",
    *[f"time.{name}{unit}" for name in ("monotonic", "perf_counter", "process_time", "time") for unit in ("", "_ns")],
    *[f"datetime.datetime.{name}" for name in ("now", "today", "utcnow")],
    "datetime.date.today",
}
# The calls that wait, and the place of the limit of each among its arguments where it has no name. A limit that is
# shorter than LEAST_LIMIT_SECONDS is a sleep where it is to run out, else too short for a machine that has much to do.
LIMITED: dict[str, int | None] = {
    **dict.fromkeys(("acquire", "wait_for"), 1),
    **dict.fromkeys(("call_later", "join", "poll", "result", "settimeout", "wait"), 0),
    **dict.fromkeys(("communicate", "exception", "get"), None),
    "asyncio.timeout": 0,
    "asyncio.wait": None,
    "asyncio.wait_for": 1,
    "concurrent.futures.wait": 1,
    "select.select": 3,
}
LEAST_LIMIT_SECONDS = 5
VIRTUAL = {"asyncio.sleep", "asyncio.timeout", "asyncio.wait", "asyncio.wait_for", "call_later", "time.monotonic"}
IN_MILLISECONDS = ("poll",)  # as ZeroMQ's
IN_PROGRAMS = re.compile(r"\btime\.(?:sleep|monotonic|perf_counter|time)(?:_ns)?\(|\basyncio\.sleep\((?!0\))")
# A file that has any of it has one of these words.
WORDS = re.compile(rf"\b(?:sleep|import time|from time|time\.|Timer|datetime|select|timeout|{'|'.join(LIMITED)})\b")
# The file and the function, and why it may.
EXCEPTIONS = {
    "cli/test_top_and_doctor.py::far_away.pump": "it stands for a slow network: the time that passes is what is found",
    "serve/http/test_acceptor.py::House.until": "what the system does with sockets sends the event loop no event",
    "support/certificates.py::_builder": "a certificate is valid from now on",
    "support/fake_runner.py::make_engine": "the clock of an engine, where the test gives it no other",
    "support/scripted_models.py::until": "those who call it run on virtual time",
    "support/serving.py::wait_until": "what another process does sends no event",
}


def uses(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the function and the name of each clock and pause in a file, also of those in the text of a program."""
    names = imported(tree)
    virtual = VIRTUAL if is_virtual(tree, names) else set()
    yield from ((where, found) for where, found in _uses(tree, names, ()) if found not in virtual)


def is_virtual(tree: ast.Module, names: dict[str, str]) -> bool:
    """Return whether coroutines run on virtual time in a file, and none run otherwise."""
    on_real_time = ("asyncio.run", "asyncio.Runner")
    return "virtual_time.run" in names.values() and not any(
        full_name(node, names) in on_real_time for node in ast.walk(tree)
    )


def _uses(node: ast.AST, names: dict[str, str], inside: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        inside = (*inside, node.name)
    where = ".".join(inside)
    if waits := is_pause(node, names):
        yield where, waits
    if is_busy_loop(node, names):
        yield where, "a busy loop"
    if isinstance(node, ast.Call) and full_name(node.func, names) == "asyncio.sleep":
        if [ast.unparse(each) for each in node.args] != ["0"]:
            yield where, "asyncio.sleep"
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from ((where, f"{found}…) in a text") for found in IN_PROGRAMS.findall(node.value))
    elif (name := full_name(node, names)) in CLOCKS:
        yield where, name
    for child in ast.iter_child_nodes(node):
        yield from _uses(child, names, inside)


def is_pause(node: ast.AST, names: dict[str, str]) -> str:
    """Return the name of a call that waits, if its limit is written there and is shorter than limits are; else ""."""
    if not isinstance(node, ast.Call):
        return ""
    name = full_name(node.func, names)
    if name not in LIMITED:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if name not in LIMITED:
        return ""
    place = LIMITED[name]
    found = [each.value for each in node.keywords if each.arg in ("timeout", "delay")]
    found += [] if place is None else node.args[place : place + 1]
    least = LEAST_LIMIT_SECONDS * (1000 if name in IN_MILLISECONDS else 1)
    is_short = any(isinstance(each, ast.Constant) and 0 < (number_of(each) or 0) < least for each in found)
    return name if is_short else ""


def number_of(node: ast.Constant) -> float | None:
    is_number = isinstance(node.value, (int, float)) and not isinstance(node.value, bool)
    return float(node.value) if is_number else None  # type: ignore[arg-type]


def is_busy_loop(node: ast.AST, names: dict[str, str]) -> bool:
    """Return whether a loop looks in each turn of the event loop whether it may end."""
    if not isinstance(node, (ast.For, ast.While)):
        return False
    within = list(_within(node))
    ends = isinstance(node, ast.While) and not isinstance(node.test, ast.Constant)
    ends |= any(isinstance(each, (ast.Return, ast.Break)) for each in within)
    calls = [each for each in within if isinstance(each, ast.Call) and full_name(each.func, names) == "asyncio.sleep"]
    return ends and any([ast.unparse(each) for each in call.args] == ["0"] for call in calls)


def _within(loop: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a loop that are not in a loop or a function within it."""
    for child in ast.iter_child_nodes(loop):
        yield child
        if not isinstance(child, (ast.For, ast.While, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from _within(child)


def imported(tree: ast.Module) -> dict[str, str]:
    """Return the full name of each name that a file imports."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.asname or each.name: each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return found


def full_name(node: ast.AST, names: dict[str, str]) -> str:
    """Return the full name of what is imported, or of an attribute of it; "" for anything else."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute):
        base = full_name(node.value, names)
        return base and f"{base}.{node.attr}"
    return ""


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    """Return the clocks and sleeps of each function, by its file and its name."""
    all_of_them: dict[str, list[str]] = {}
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        for function, name in uses(ast.parse(text)) if WORDS.search(text) else ():
            all_of_them.setdefault(f"{path.relative_to(TESTS).as_posix()}::{function}", []).append(name)
    return all_of_them


def test_nobody_sleeps_or_reads_a_clock(found: dict[str, list[str]]) -> None:
    assert not {where: names for where, names in found.items() if where not in EXCEPTIONS}


def test_every_exception_is_still_one(found: dict[str, list[str]]) -> None:
    assert not EXCEPTIONS.keys() - found.keys()


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import time\ntime.sleep(1)", ["time.sleep"]),
        ("import time as t\ndef wait(clock=t.monotonic): ...", ["time.monotonic"]),
        ("from time import perf_counter as now\nnow()", ["time.perf_counter"]),
        ("from datetime import datetime\ndatetime.now()", ["datetime.datetime.now"]),
        ("import threading\nthreading.Timer(1, print)", ["threading.Timer"]),
        ("import asyncio\nasync def wait(): await asyncio.sleep(0.1)", ["asyncio.sleep"]),
        ("import asyncio\nasync def turn(): await asyncio.sleep(0)", []),
        ("from asyncio import sleep\nfrom virtual_time import run\nasync def wait(): await sleep(60)", []),
        ("import time\nfrom virtual_time import run\nassert run(work()) < time.monotonic()", []),
        ("import time\nfrom virtual_time import run\ntime.sleep(1)", ["time.sleep"]),
        ("import asyncio\nfrom virtual_time import run\nasyncio.run(asyncio.sleep(1))", ["asyncio.sleep"]),
        ("PROGRAM = 'import time; time.sleep(60)'", ["time.sleep(…) in a text"]),
        ("PROGRAM = f'''import time\nend = {1} + time.monotonic()'''", ["time.monotonic(…) in a text"]),
        ("assert not event.wait(0.2)", ["wait"]),
        ("assert event.wait(60) and not event.wait(0) and event.wait(timeout)", []),
        ("from subprocess import Popen\nPopen('x').wait(timeout=1)", ["wait"]),
        ("socket.poll(50)\nsocket.poll(0)\nsocket.poll(20_000)", ["poll"]),
        ("queue.get(timeout=1)\nnumbers.get('x', 1)\nqueue.get(timeout=20)", ["get"]),
        ("', '.join(names)\nthread.join(0.5)", ["join"]),
        ("future.result(1)\nlock.acquire(True, 1)\nlock.acquire(False)", ["result", "acquire"]),
        ("import asyncio\nasync def f(): await asyncio.wait_for(g(), 0.1)", ["asyncio.wait_for"]),
        ("import asyncio\nasync def f(): await asyncio.wait({g()}, timeout=1)", ["asyncio.wait"]),
        ("from asyncio import wait\nfrom virtual_time import run\nasync def f(): await wait({g()}, timeout=1)", []),
        ("from select import select\nselect([a], [], [], 1)", ["select.select"]),
        ("loop.call_later(0.01, print)", ["call_later"]),
        ("import asyncio\nasync def f():\n while not done: await asyncio.sleep(0)", ["a busy loop"]),
        ("import asyncio\nasync def f():\n for _ in r:\n  if x: return\n  await asyncio.sleep(0)", ["a busy loop"]),
        ("import asyncio\nasync def f():\n for _ in range(9): await asyncio.sleep(0)", []),
        ("import asyncio\nasync def f():\n while True: await asyncio.sleep(0)", []),
        ("def model(time): return time.sleep", []),
        ("import time\nmonkeypatch.setattr(time, 'sleep', pauses.append)", []),
    ],
)
def test_what_is_found(source: str, names: list[str]) -> None:
    assert [name for _, name in uses(ast.parse(source))] == names
