"""Tests of how a test run treats what its machine lacks: packages, and a GPU.

A test file that imports a package of an extra which is not there is skipped, and says which. Under continuous
integration a test that is skipped for want of a package fails: it would never run otherwise.

Tests marked `gpu` compile for the GPU at hand, or for one that is not there, and run where there is one (real_gpu.py).
"""

import os
import re
from collections.abc import Generator

import pytest

# The packages that the extras of pyproject.toml bring, by the names that are imported. `make gpu-test` runs on machines
# where nothing can be installed.
OF_EXTRAS = frozenset(
    [
        "aiohttp",
        "axe_playwright_python",
        "cryptography",
        "fastapi",
        "google",
        "grpc",
        "grpc_health",
        "grpc_reflection",
        "httptools",
        "hypothesis",
        "jsonschema",
        "llguidance",
        "matplotlib",
        "onnx",
        "onnx_ir",
        "onnxruntime",
        "opentelemetry",
        "playwright",
        "prometheus_client",
        "psutil",
        "safetensors",
        "sentencepiece",
        "starlette",
        "tensorrt_rtx",
        "triton",
        "tvm_ffi",
        "uvicorn",
        "xgrammar",
        "yaml",
        "zmq",
    ]
)
MISSING = re.compile(r"^E? *ModuleNotFoundError: No module named '(\w+)[.\w]*'$", re.MULTILINE)


def is_for_want_of_a_package(report: pytest.TestReport | pytest.CollectReport) -> bool:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
    return report.skipped and ("could not import" in reason or "No module named" in reason or "not installed" in reason)


def fail_if_wanting(report: pytest.TestReport | pytest.CollectReport) -> None:
    if os.environ.get("CI") and is_for_want_of_a_package(report):
        report.outcome = "failed"
        report.longrepr = f"skipped under CI: {report.longrepr}"


def skip_without_its_package(report: pytest.CollectReport, path: str) -> None:
    """Make a file's failed import of a package of an extra a skip that names it."""
    found = MISSING.findall(str(report.longrepr)) if report.failed else []
    if found and found[-1] in OF_EXTRAS:
        report.outcome = "skipped"
        report.longrepr = (path, 0, f"Skipped: {found[-1]} is not installed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--best-isa", action="store_true", help="kernels for this machine's best instruction set alone")
    parser.addoption(
        "--as-shipped",
        action="store_true",
        help="C++ as in artifacts: -O3, for all instruction sets",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Have tests compile C++ in half the time, also in processes of theirs."""
    if not config.getoption("as_shipped"):
        os.environ.setdefault("INFERC_CXXFLAGS", "-O1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take minutes, or one process ends long after the others."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


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
    skip_without_its_package(report, str(collector.path))
    fail_if_wanting(report)
    return report
