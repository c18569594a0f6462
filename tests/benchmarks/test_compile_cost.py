"""The benchmark of a compile's cost: what it counts as memory, and that its parts run."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/compile_cost.py"
GRANDCHILD = (
    "import sys; data = bytearray(300 << 20); data[::4096] = b'x' * len(data[::4096]); open(sys.argv[1], 'rb').read(1)"
)
CHILD = (
    f"import json, subprocess, sys; subprocess.run([sys.executable, '-c', {GRANDCHILD!r}, sys.argv[1]]);"
    " print(json.dumps({'a': 1}))"
)
MANY_SAMPLES = 2000


@pytest.fixture(scope="module")
def compile_cost() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compile_cost", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["compile_cost"] = module
    spec.loader.exec_module(module)
    return module


def test_the_memory_of_what_a_process_starts_counts(
    compile_cost: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that has the memory ends as soon as it was seen."""
    fifo = tmp_path / "seen"
    os.mkfifo(fifo)
    seen = os.open(fifo, os.O_RDWR)
    sample = compile_cost.Peak.sample

    def sample_and_tell(peak: Any, pid: int) -> None:
        sample(peak, pid)
        if peak.anonymous > 300 << 20 or peak.samples > MANY_SAMPLES:
            os.write(seen, b"x")

    monkeypatch.setattr(compile_cost.Peak, "sample", sample_and_tell)
    times = iter((100.0, 102.5))
    monkeypatch.setattr(compile_cost, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    output, cost = compile_cost.measured([sys.executable, "-c", CHILD, str(fifo)])
    os.close(seen)
    assert output == {"a": 1}
    assert 0.3 < cost["anonymous_gb"] < 0.6 and cost["anonymous_gb"] <= cost["rss_gb"]
    assert cost["max_rss_gb"] > 0.3
    assert cost["seconds"] == 2.5


def test_a_command_that_fails_is_said(compile_cost: ModuleType) -> None:
    with pytest.raises(SystemExit, match="failed with status 3"):
        compile_cost.measured([sys.executable, "-c", "raise SystemExit(3)"])


@pytest.mark.slow
def test_the_parts_of_a_compile_are_timed(compile_cost: ModuleType, tiny_llama_folder: Path) -> None:
    times = compile_cost.capture_and_lower(str(tiny_llama_folder))
    assert list(times) == ["import_s", "load_s", "capture_s", "check_s", "passes_s", "emit_s"]
    assert times["capture_s"] > 0
