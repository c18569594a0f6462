"""The GPU benchmark from end to end on a fake driver: every row is measured, of a tiny model, and merged into the results."""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import gpu
import gpu_kernels
import gpu_model
import gpu_tune
from fake_cuda import FakeCuda

from inferc.codegen.triton import build as build_module
from inferc.codegen.triton import emit as emit_module
from inferc.codegen.triton import tuning
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

    for module in (build_module, emit_module, gpu, gpu_kernels, gpu_model, gpu_tune):
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


def test_tiles_are_tried_and_the_best_is_kept(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    times = (1e9 * 0.9**turn for turn in itertools.count())  # each faster than the one before
    monkeypatch.setattr(gpu_tune.Bed, "microseconds", lambda *_: next(times))
    monkeypatch.setattr(gpu_tune, "SIZES", {"BLOCK_N": (32,), "BLOCK_K": (64, 128)})
    monkeypatch.setattr(gpu_tune, "WARPS", (4,))
    monkeypatch.setattr(gpu_tune, "STAGES", (3,))
    monkeypatch.setattr(sys, "argv", ["gpu_tune.py", "--tiny", "--out", str(tmp_path), "tiny"])
    gpu_tune.main()
    entries = json.loads((tmp_path / "sm_90.json").read_text())
    assert {entry["kernel"] for entry in entries} == set(gpu_tune.KERNELS)
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    tuning._entries.cache_clear()
    step = gpu_model.random_step(gpu.TINY, "sm_90", None)
    used = [tuning.tuned(name.rpartition("-")[0], source, "sm_90") for name, source in step.sources.items()]
    changed = [each for each, source in zip(used, step.sources.values(), strict=True) if each is not source]
    assert len(changed) == len(entries) and all(each.constants["BLOCK_K"] == 128 for each in changed)
    tuning._entries.cache_clear()
    assert not fake.device


def test_a_tile_is_timed(fake: FakeCuda) -> None:
    step = gpu_model.random_step(gpu.TINY, "sm_90", None)
    source = next(source for name, source in step.sources.items() if name.startswith("linear-"))
    bed = gpu_tune.Bed(driver.Driver(), 1 << 16, 1 << 21)
    cubin = build_module.build(source, "linear", source.function.__name__, "sm_90")
    fake.know(cubin.data, cubin.record)
    assert bed.microseconds(source, cubin) == pytest.approx(1000.0)
    bed.close()
    assert not fake.device


def test_an_unknown_row_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "decode"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "unknown row decode; known: bandwidth, kernels, 8b-decode" in capsys.readouterr().err
