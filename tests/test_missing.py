"""Tests of how a test run treats what its machine lacks: packages of extras, and a GPU."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import real_gpu

ROOT = Path(__file__).parents[1]
TRACE = """ImportError while importing test module '{root}/tests/serve/test_x.py'.
tests/support/serving.py:17: in <module>
    import {name}
E   ModuleNotFoundError: No module named '{name}'"""


@pytest.fixture(scope="module")
def conftest() -> ModuleType:
    spec = importlib.util.spec_from_file_location("root_conftest", ROOT / "conftest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def collected(conftest: ModuleType, name: str) -> pytest.CollectReport:
    report = pytest.CollectReport("tests/serve/test_x.py", "failed", TRACE.format(root=ROOT, name=name), None)
    conftest.skip_without_its_package(report, "test_x.py")
    conftest.fail_if_wanting(report)
    return report


@pytest.mark.parametrize("name", ["psutil", "google.protobuf"])
def test_a_file_without_its_package_is_skipped_by_name(
    conftest: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CI", raising=False)
    report = collected(conftest, name)
    assert report.skipped and report.longrepr == ("test_x.py", 0, f"Skipped: {name.split('.')[0]} is not installed")
    monkeypatch.setenv("CI", "1")
    assert collected(conftest, name).failed


@pytest.mark.parametrize("name", ["inferc.serve.gone", "torch", "psutil2"])
def test_any_other_import_that_fails_is_a_failure(conftest: ModuleType, name: str) -> None:
    assert collected(conftest, name).failed


def test_without_a_gpu_a_test_ends_where_it_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_gpu, "_arch", lambda: None)
    assert (real_gpu.chip(), real_gpu.chip("sm_89")) == ("sm_90", "sm_89")
    for compiled, told in (("3 kernels", "3 kernels compiled"), ("", "nothing to compile")):
        with pytest.raises(pytest.skip.Exception, match=f"{told}; needs an NVIDIA GPU"):
            real_gpu.need_gpu(compiled)


def test_with_a_gpu_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_gpu, "_arch", lambda: "sm_80")
    assert real_gpu.chip() == "sm_80"
    real_gpu.need_gpu("3 kernels")
