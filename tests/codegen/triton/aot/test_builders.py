"""Kernels that are compiled by several processes: the bytes of one alone, what they refuse, and how they end."""

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

from triton_cases import KERNELS

from inferc.codegen.triton.aot.build import Cubin
from inferc.codegen.triton.aot.builders import Builders, Job
from inferc.errors import VerifyError


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    """Return three jobs, the third of which spills more than it may."""
    of_table = next(KERNELS["rope_table"]()).source
    activations = [case.source for case in list(KERNELS["silu_mul"]())[:3]]
    made = [Job(source, f"k{index}", "", "sm_90") for index, source in enumerate(activations)]
    return [*made[:2], Job(replace(of_table, stack_bytes=0), "table", "", "sm_90", fit=False), made[2]]


def test_processes_make_the_bytes_of_one(jobs: list[Job]) -> None:
    """The results come in the order in which they were asked for, whichever is done first."""
    with Builders(1) as here, Builders(2) as others:
        found, expected = list(others.tried(jobs)), list(here.tried(jobs))
    assert [str(each) for each in found if isinstance(each, Exception)] == [
        "table for sm_90: 32 bytes of a thread's registers spilled, its budget is 0"
    ]
    assert isinstance(found[2], VerifyError)
    assert [each for each in found if isinstance(each, Cubin)] == [each for each in expected if isinstance(each, Cubin)]


@pytest.mark.slow
def test_what_a_kernel_raises_is_raised(jobs: list[Job]) -> None:
    with Builders(2) as builders, pytest.raises(VerifyError, match="table for sm_90: 32 bytes of a thread's registers"):
        list(builders.build(jobs))


def test_what_triton_raises_says_where() -> None:
    source = next(KERNELS["silu_mul"]()).source
    broken = replace(source, constants={**source.constants, "BLOCK": 1000})  # no power of two
    with Builders(2) as builders, pytest.raises(RuntimeError, match=r"(?s)Traceback .*power of 2"):
        list(builders.build([Job(broken, "broken", "", "sm_90")]))


def test_a_process_that_is_killed_is_named(jobs: list[Job]) -> None:
    with Builders(2) as builders:
        for process in builders._processes:
            process.kill()
        with pytest.raises(VerifyError, match="k0 for sm_90: the process that compiled it ended with code -9"):
            list(builders.build(jobs))


def test_who_stops_early_leaves_nothing_behind(jobs: list[Job]) -> None:
    before = threading.active_count()
    with Builders(2) as builders:
        assert isinstance(next(builders.tried(jobs * 20)), Cubin)
    assert all(process._process.returncode is not None for process in builders._processes)
    assert threading.active_count() == before


@pytest.mark.slow
def test_a_script_without_a_guard_may_ask(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from inferc.codegen.triton.aot.builders import Builders, Job\n"
        "from triton_cases import KERNELS\n"
        "print('once')\n"
        "source = next(KERNELS['silu_mul']()).source\n"
        "with Builders(2) as builders:\n"
        "    print(len(list(builders.build([Job(source, 'k', '', 'sm_90')]))))\n"
    )
    paths = str(Path(__file__).parents[3] / "support")
    code = f"import sys, runpy; sys.path.append({paths!r}); runpy.run_path({str(script)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "once\n1\n"), done.stderr
