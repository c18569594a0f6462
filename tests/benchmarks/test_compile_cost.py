"""The benchmark of a compile's cost: what it counts as memory, and that its parts run."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/compile_cost.py"
GRANDCHILD = "import time; data = bytearray(300 << 20); data[::4096] = b'x' * len(data[::4096]); time.sleep(0.5)"
CHILD = (
    f"import json, subprocess, sys; subprocess.run([sys.executable, '-c', {GRANDCHILD!r}]);"
    " print(json.dumps({'a': 1}))"
)


@pytest.fixture(scope="module")
def compile_cost() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compile_cost", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["compile_cost"] = module
    spec.loader.exec_module(module)
    return module


def test_the_memory_of_what_a_process_starts_counts(compile_cost: ModuleType) -> None:
    output, cost = compile_cost.measured([sys.executable, "-c", CHILD])
    assert output == {"a": 1}
    assert 0.3 < cost["anonymous_gb"] < 0.6 and cost["anonymous_gb"] <= cost["rss_gb"]
    assert cost["max_rss_gb"] > 0.3
    assert cost["seconds"] >= 0.5


def test_a_command_that_fails_is_said(compile_cost: ModuleType) -> None:
    with pytest.raises(SystemExit, match="failed with status 3"):
        compile_cost.measured([sys.executable, "-c", "raise SystemExit(3)"])


@pytest.mark.slow
def test_the_parts_of_a_compile_are_timed(compile_cost: ModuleType, tiny_llama_folder: Path) -> None:
    times = compile_cost.capture_and_lower(str(tiny_llama_folder))
    assert list(times) == ["import_s", "load_s", "capture_s", "check_s", "passes_s", "emit_s"]
    assert times["capture_s"] > 0
