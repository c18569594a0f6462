"""The GPU benchmark from end to end on a fake driver: every row is measured, of a tiny model, and merged into the results."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import gpu
import gpu_kernels
import gpu_model
from fake_cuda import FakeCuda

from inferc.codegen.triton import build as build_module
from inferc.codegen.triton import emit as emit_module
from inferc.runtime.cuda import driver

WITHOUT_TORCH = [name for name in gpu.ROWS if "transformers" not in name]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made = FakeCuda(execute=False)
    build = build_module.build

    def known(*arguments: Any, **options: Any) -> Any:
        cubin = build(*arguments, **options)
        made.know(cubin.data, cubin.record)
        return cubin

    for module in (build_module, emit_module, gpu, gpu_kernels, gpu_model):
        monkeypatch.setattr(module, "build", known)
    monkeypatch.setattr(driver, "open_library", lambda: made)
    return made


def measured(monkeypatch: pytest.MonkeyPatch, out: Path, *names: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--tiny", "--out", str(out), *names])
    gpu.main()
    rows: dict[str, Any] = json.loads(out.read_text())["rows"]
    return rows


def test_every_row_is_measured_and_kept(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    names = WITHOUT_TORCH
    rows = measured(monkeypatch, out, *names)
    assert list(rows) == names
    assert all("error" not in row and row["gpu"] == "Fake GPU" and row["commit"] for row in rows.values())
    assert rows["8b-decode"]["tokens_per_s"] > 0 and rows["8b-decode"]["device_ms_a_step"] == pytest.approx(0.05)
    assert fake.calls["cuGraphLaunch"] > 50
    assert not fake.device and not fake.host, "everything was given back"
    rows["8b-prefill"]["tokens_per_s"] = -1.0
    out.write_text(json.dumps({"rows": rows}))
    again = measured(monkeypatch, out, "8b-decode")
    assert again["8b-prefill"]["tokens_per_s"] == -1.0, "a row that is not measured stays"


def test_an_unknown_row_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "decode"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "unknown row decode; known: bandwidth, kernels, 8b-decode" in capsys.readouterr().err
