"""Sampling on a GPU: every step of the cases under the interpreter, and what the kernels cost a chip."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from sampling_cases import STEPS, kernels_of

from inferc.codegen.triton.aot.build import build

INTERPRETED = Path(__file__).parent / "interpreted_sampling.py"
SUPPORT = Path(__file__).parents[2] / "support"
SELDOM = ("combined 1000 128 2", "combined 4097 4096 3", "ties 5 64", "filters")
OFTEN = tuple(name for name in STEPS if name not in SELDOM)
ARCHS = ("sm_80", "sm_90", "sm_100")
VOCABS = (50257, 5, 128256)
MAX_SHARED = 100 << 10  # bytes of a block: what the smallest of the chips that we compile for has


@pytest.fixture(scope="module")
def faults() -> dict[str, list[str]]:
    """Return what is wrong in each case that is tried often."""
    return faults_of(*OFTEN)


@pytest.fixture(scope="module")
def other_faults() -> dict[str, list[str]]:
    return faults_of(*SELDOM)


def faults_of(*names: str) -> dict[str, list[str]]:
    path = os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, INTERPRETED, *names], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", [*OFTEN, "late ids", "scores"])
def test_samples_as_the_oracle_does(faults: dict[str, list[str]], case: str) -> None:
    assert not faults[case], "\n".join(faults[case][:10])


@pytest.mark.slow
@pytest.mark.parametrize("case", SELDOM)
def test_samples_more_as_the_oracle_does(other_faults: dict[str, list[str]], case: str) -> None:
    assert not other_faults[case], "\n".join(other_faults[case][:10])


@pytest.mark.slow
@pytest.mark.quick(f"{VOCABS[0]}-sm_90")
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("vocab", VOCABS)
def test_compiles_within_its_budget(vocab: int, arch: str) -> None:
    """`build` refuses what spills more than its source allows, or does not fit its launch record."""
    for name, source in kernels_of(vocab).items():
        assert source.stack_bytes <= 32
        shared = build(source, name, "", arch).record.shared_bytes
        assert shared <= MAX_SHARED, f"{name}: {shared} bytes of shared memory"
