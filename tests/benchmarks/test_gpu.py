"""The GPU benchmark runs end to end on a fake driver: every row is measured on a tiny model and merged into results."""

import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import gpu
import gpu_kernels
import gpu_model
import gpu_start
import gpu_tune
from fake_cublaslt import FakeCublasLt
from fake_cuda import FakeCuda
from random_models import make_random_model
from transformers import AutoConfig, AutoModelForCausalLM

from inferc.codegen.triton.aot import build as build_module
from inferc.codegen.triton.aot import builders, tuning
from inferc.codegen.triton.aot.builders import Builders
from inferc.codegen.triton.calls import matmul
from inferc.errors import UnsupportedError
from inferc.runtime.runners.cuda import cublaslt, driver, shared_prefixes
from inferc.targets import ARCHS

pytestmark = [pytest.mark.long, pytest.mark.slow]

ON_FAKE_GPU = Path(__file__).parents[1] / "support" / "on_fake_gpu.py"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made = FakeCuda(execute=False)
    build = build_module.build

    def known(*arguments: Any, **options: Any) -> Any:
        cubin = build(*arguments, **options)
        made.know(cubin.data, cubin.record)
        return cubin

    for module in (build_module, gpu, gpu_kernels, gpu_model):
        monkeypatch.setattr(module, "build", known)
    monkeypatch.setattr(matmul, "ROW_BOUNDS", (16, None))  # fewer kernels to compile
    monkeypatch.setattr(builders, "WORTH_ONE", 1 << 20)  # all by this process, which tells the GPU of them
    monkeypatch.setattr(driver, "open_library", lambda: made)

    def no_library(newest: int) -> Any:
        raise UnsupportedError(f"no libcublasLt.so.{newest} on this machine")

    monkeypatch.setattr(cublaslt, "open_library", no_library)
    options = json.dumps({"execute": False})
    monkeypatch.setattr(gpu_start, "inferc", lambda artifact: [sys.executable, ON_FAKE_GPU, artifact, options, "--"])
    monkeypatch.setattr(gpu_start, "write_model", lambda _, folder: make_random_model("llama", folder, "float32"))
    monkeypatch.setattr(gpu_start, "REPEATS", 1)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(("src", str(ON_FAKE_GPU.parent))))
    return made


def measured(monkeypatch: pytest.MonkeyPatch, out: Path, *names: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--tiny", "--out", str(out), *names])
    gpu.main()
    rows: dict[str, Any] = json.loads(out.read_text())["rows"]
    return rows


@pytest.mark.slow
def test_rows_of_one_model_are_measured_and_kept(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "gpu.json"
    rows = measured(
        monkeypatch, out, "bandwidth", "kernels", "8b-decode", "8b-decode-128", "8b-shared-prefix", "8b-prefill"
    )
    check_rows(rows, fake)
    rows["8b-prefill"]["tokens_per_s"] = -1.0
    out.write_text(json.dumps({"rows": rows}))
    again = measured(monkeypatch, out, "8b-decode")
    assert again["8b-prefill"]["tokens_per_s"] == -1.0, "a row that is not measured stays"


def check_rows(rows: dict[str, Any], fake: FakeCuda) -> None:
    assert {row: found["error"] for row, found in rows.items() if "error" in found} == {}
    assert all(row["gpu"] == "Fake GPU" and row["commit"] for row in rows.values())
    assert rows["8b-decode"]["tokens_per_s"] > 0 and rows["8b-decode"]["device_ms_a_step"] == pytest.approx(0.05)
    for name in ("8b-decode", "8b-int8kv-decode-128", "8b-idle-128", "8b-decode-128-deterministic", "8b-shared-prefix"):
        if name not in rows:
            continue
        of_limit = rows[name]["tokens_per_s"] / rows[name]["limit"]
        assert of_limit == pytest.approx(rows[name]["of_limit"], abs=1e-3), name
    assert any(name.startswith("prefix_attention") for name in fake.launched)
    assert shared_prefixes.LEAST_SAVED_BYTES > 1, "it is put back"
    assert fake.calls["cuGraphLaunch"] > 20
    assert not fake.device and not fake.host, "everything was given back"


@pytest.mark.slow
def test_every_row_is_measured(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = measured(monkeypatch, tmp_path / "gpu.json")
    assert list(rows) == list(gpu.DEFAULT)
    check_rows(rows, fake)
    found = rows["8b-decode-deterministic"]
    assert found["price"] == pytest.approx(1 - found["tokens_per_s"] / found["fast_tokens_per_s"], abs=1e-3)
    assert rows["8b-idle-128"]["idle"] == pytest.approx(1 - 0.05 / rows["8b-idle-128"]["ms_a_step"], abs=1e-3)
    assert rows["8b-start"]["first_token_s"] > 0 and rows["8b-start"]["target_s"] == 2.0


@pytest.fixture
def few_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gpu_tune, "SIZES", {"BLOCK_N": (32,), "BLOCK_K": (64, 128)})
    monkeypatch.setattr(gpu_tune, "WARPS", (4,))
    monkeypatch.setattr(gpu_tune, "STAGES", (3,))
    yield
    tuning._entries.cache_clear()


def tuned(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[dict[str, Any]]:
    """Return the tuning data that the compiler reads after the measurement."""
    monkeypatch.setattr(sys, "argv", ["gpu_tune.py", "--tiny", "--out", str(folder), "tiny"])
    gpu_tune.main()
    monkeypatch.setattr(tuning, "FOLDER", folder)
    tuning._entries.cache_clear()
    entries: list[dict[str, Any]] = json.loads((folder / "sm_90.json").read_text())
    return entries


@pytest.mark.slow
@pytest.mark.usefixtures("few_tiles")
def test_tiles_are_tried_and_the_best_is_kept(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = (1e9 * 0.9**turn for turn in itertools.count())  # each faster than the one before
    monkeypatch.setattr(gpu_tune.Bed, "microseconds", lambda *_: next(times))
    entries = tuned(monkeypatch, tmp_path)
    assert {entry["kernel"] for entry in entries} == set(gpu_tune.KERNELS)
    step = gpu_model.random_step(gpu.TINY, "sm_90", None)
    used = [tuning.tuned(name.rpartition("-")[0], source, "sm_90") for name, source in step.sources.items()]
    changed = [each for each, source in zip(used, step.sources.values(), strict=True) if each is not source]
    assert len(changed) == len(entries) and all(each.constants["BLOCK_K"] == 128 for each in changed)
    tuning._entries.cache_clear()
    assert not fake.device and not fake.host
    assert capsys.readouterr().err == "gpu_tune.py: not beside cuBLASLt: no libcublasLt.so.13 on this machine\n"


def test_the_library_is_chosen_from_where_it_is_faster(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = FakeCublasLt(fake)
    monkeypatch.setattr(cublaslt, "open_library", lambda _: library)
    monkeypatch.setattr(gpu_tune, "candidates", lambda source: [source])
    monkeypatch.setattr(gpu_tune.Bed, "microseconds", lambda *_: 100.0)

    def theirs(slow: dict[int, float]) -> Any:
        return lambda _bed, _source, rows: slow.get(rows, 50.0)

    monkeypatch.setattr(gpu_tune.Bed, "library_microseconds", theirs({192: 99.0, 512: 98.0}))
    entries = tuned(monkeypatch, tmp_path)
    assert {entry["kernel"] for entry in entries} == {"linear"}
    of_tokens, of_rows = ([e for e in entries if e["shape"]["COUNT"] == count] for count in (0, 1))
    measured = {str(rows): [100.0, 50.0] for rows in (4096, 3000, 2048, 1000)}
    assert [each["library"] for each in of_tokens] == [{"name": "cublaslt", "from_rows": 1000, "us": measured}] * 2
    assert [each["library"]["from_rows"] for each in of_rows] == [256] * 3
    step = gpu_model.random_step(gpu.TINY, "sm_90", None)
    with Builders(1) as here:
        cubins = dict(step.compile("sm_90", here))
    chosen = {name: cubin.record.library for name, cubin in cubins.items() if cubin.record.library}
    assert len(chosen) == 5 and chosen.keys() <= step.for_many_rows
    assert {each.from_rows for each in chosen.values()} == {256, 1000}
    measured_of = [tuning.library_choice("linear", step.sources[name], arch) for name in chosen for arch in ARCHS]
    assert sum(each is not None for each in measured_of) == 5, "on one chip"

    monkeypatch.setattr(gpu_tune.Bed, "library_microseconds", theirs({4096: 98.0, 256: 98.0}))
    assert tuned(monkeypatch, tmp_path) == [], "measured again, the kernels are"
    assert not fake.device and not library.objects
    tuning._entries.cache_clear()


def test_a_tile_and_the_library_are_timed(fake: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    step = gpu_model.random_step(gpu.TINY, "sm_90", None)
    source = next(source for name, source in step.sources.items() if name in step.for_many_rows and source.product)
    bed = gpu_tune.Bed(driver.Driver(), 1 << 16, 1 << 21)
    cubin = build_module.build(source, "linear", source.function.__name__, "sm_90")
    fake.know(cubin.data, cubin.record)
    assert bed.microseconds(source, cubin, 200) == pytest.approx(1000.0)
    library = FakeCublasLt(fake, knows=256)
    bed.library = cublaslt.CublasLt(library, bed.driver.allocate)
    assert bed.library_microseconds(source, 200) == pytest.approx(1000.0)
    assert {rows for rows, *_ in library.computed} == {200}
    assert bed.library_microseconds(source, 512) is None
    assert "instead of cuBLASLt" in caplog.text
    bed.close()
    assert not fake.device and not fake.host and not library.objects


def test_an_unknown_row_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "decode"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "unknown row decode; known: bandwidth, kernels, 8b-decode" in capsys.readouterr().err


def test_a_kernel_that_is_off_says_how_far_and_the_next_is_measured() -> None:
    expected = torch.tensor([1.0, -4.0, 0.0], dtype=torch.bfloat16)
    written = torch.tensor([1.0, -4.25, 0.5])
    assert gpu_kernels.difference(written, expected, 0.5) == {"off": 0.5}
    assert gpu_kernels.difference(written, expected, 0.1) == {
        "off": 0.5,
        "error": "1 of 3 elements are off by more than 0.1",
    }
    written[0] = torch.nan
    assert gpu_kernels.difference(written, expected, 0.5)["error"] == "1 of 3 elements are off by more than 0.5"


def test_kernels_are_held_to_numbers_without_the_roundings_of_pytorchs() -> None:
    products = [bench for bench in gpu_kernels.benches(gpu_kernels.tiny()) if bench.exact is not None]
    names = {f"{name}{suffix}" for name in ("linear", "linear_silu_mul") for suffix in ("", "_int8")}
    assert {bench.kernel for bench in products} == names
    for bench in products:
        assert bench.exact is not None
        exact = bench.exact()
        assert exact.dtype == torch.float32
        x, weight = bench.tensors["x_ptr"].double(), bench.tensors["weight_ptr"].double()
        scale = bench.tensors.get("scale_ptr", torch.ones(1)).double()
        out = x @ weight.T * scale
        if "silu" in bench.kernel:
            gate, up = out.chunk(2, -1)
            out = gate * torch.sigmoid(gate) * up
        torch.testing.assert_close(exact.double(), out, rtol=1e-5, atol=1e-5)
        assert "error" not in gpu_kernels.difference(bench.reference(), exact, bench.tolerance)


def test_a_tied_head_is_read_and_an_embedding_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_model, "write_code", lambda *arguments, **options: ({}, None))
    tied, apart = (
        gpu_model.random_model({**gpu.TINY, "tie_word_embeddings": value}, "sm_90", max_model_len=256).read_bytes
        for value in (True, False)
    )
    config = AutoConfig.for_model(**gpu.TINY, tie_word_embeddings=True)
    frequencies = 4 * (gpu.TINY["head_dim"] // 2)  # in float32
    assert tied == apart == 2 * AutoModelForCausalLM.from_config(config).num_parameters() + frequencies
