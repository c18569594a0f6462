"""Tests of the row of the GPU's tests, which is made of what pytest wrote about them."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from gpu_tests import outcome

REPORT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites name="pytest tests"><testsuite name="pytest" errors="1" failures="1" skipped="2" tests="5" time="9.0">
<testcase classname="tests.test_gpu" name="test_a[llama]" time="1.5" />
<testcase classname="tests.test_gpu" name="test_a[phi]" time="0.25"><failure message="no">…</failure></testcase>
<testcase classname="tests.test_gpu" name="test_b" time="0.25"><error message="no">…</error></testcase>
<testcase classname="" name="tests.serve.test_x" time="0.0">
<skipped message="grpc is not installed">…</skipped></testcase>
<testcase classname="" name="tests.serve.test_y" time="0.0">
<skipped message="grpc is not installed">…</skipped></testcase>
</testsuite></testsuites>"""


def test_the_row_of_the_tests(tmp_path: Path) -> None:
    (tmp_path / "tests.xml").write_text(REPORT)
    assert outcome(tmp_path / "tests.xml") == {
        "passed": 1,
        "failed": ["tests.test_gpu::test_a[phi]", "tests.test_gpu::test_b"],
        "skipped": {"grpc is not installed": 2},
        "seconds": 2.0,
    }
