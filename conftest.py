"""Under continuous integration a test that is skipped for want of a package fails: it would never run otherwise.

Tests that need a GPU are skipped where there is none; `make gpu-test` asks for one before it runs them.
"""

import ctypes
import functools
import os
from collections.abc import Generator

import pytest


def is_for_want_of_a_package(report: pytest.TestReport | pytest.CollectReport) -> bool:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
    return report.skipped and ("could not import" in reason or "No module named" in reason or "not installed" in reason)


def fail_if_wanting(report: pytest.TestReport | pytest.CollectReport) -> None:
    if os.environ.get("CI") and is_for_want_of_a_package(report):
        report.outcome = "failed"
        report.longrepr = f"skipped under CI: {report.longrepr}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    fail_if_wanting(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    fail_if_wanting(report)
    return report


@functools.cache
def has_gpu() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not has_gpu():
        pytest.skip("needs an NVIDIA GPU")
