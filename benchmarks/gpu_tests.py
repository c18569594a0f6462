"""Run the tests that need an NVIDIA GPU, and add their outcome to the results.

    python benchmarks/gpu_tests.py [OPTION OF PYTEST …]

They run in one process for each core but two; tests that share compiled models run in the same process (pytest's "-n 0"
runs all of them in this process). The row "tests" of benchmarks/results/gpu.json says how many passed, which failed and
why others were skipped, with GPU, versions, commit and date.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from gpu import RESULTS, merge

from inferc.errors import InfercError
from inferc.runtime.runners.cuda.driver import Driver
from inferc.system.resources import available_cores

ROOT = Path(__file__).resolve().parents[1]
NOT_PASSED = ("failure", "error", "skipped")


def outcome(report: Path) -> dict[str, Any]:
    """Summarize a report of pytest's --junitxml: numbers of passed tests, failed tests and reasons of skipped ones."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    skipped = [found for case in cases if (found := case.find("skipped")) is not None]
    return {
        "passed": sum(not any(case.find(each) is not None for each in NOT_PASSED) for case in cases),
        "failed": sorted(
            f"{case.get('classname')}::{case.get('name')}"
            for case in cases
            if case.find("failure") is not None or case.find("error") is not None
        ),
        "skipped": dict(Counter(str(each.get("message")) for each in skipped)),
        "seconds": round(sum(float(case.get("time", 0)) for case in cases), 1),
    }


def main() -> None:
    try:
        driver = Driver()
    except InfercError as error:
        sys.exit(f"gpu_tests.py: {error}")
    driver.close()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        spread = ["-n", str(max(1, available_cores() - 2)), "--dist", "loadgroup"]
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-rs", f"--junitxml={report}", *spread, *sys.argv[1:]]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if report.exists():
            merge({"tests": outcome(report)}, driver.name, RESULTS)
    sys.exit(code)


if __name__ == "__main__":
    main()
