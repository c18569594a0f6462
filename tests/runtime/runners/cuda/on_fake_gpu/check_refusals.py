"""Tests that a GPU's limits are told in one line before anything is allocated, with what to do."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from fake_cuda import FakeCuda
from fake_gpu import ARTIFACTS
from manifests import read_manifest, rewrite_manifest

from inferc.errors import ConfigError, InfercError, UnsupportedError
from inferc.runtime.engine.load import load_engine
from inferc.runtime.runners.cuda import driver

LLAMA = ARTIFACTS / "llama"


def refused(
    monkeypatch: pytest.MonkeyPatch, kind: type[InfercError], options: dict[str, Any], **engine: Any
) -> tuple[str, FakeCuda]:
    fake = FakeCuda(LLAMA, **options)
    monkeypatch.setattr(driver, "open_library", lambda: fake)
    with pytest.raises(kind) as error:
        load_engine(LLAMA, **engine)
    assert "\n" not in str(error.value)
    return str(error.value), fake


def without_ptx(folder: Path) -> Path:
    """A copy of the artifact as one that was compiled without PTX."""
    shutil.copytree(LLAMA, folder)
    programs = read_manifest(folder)["programs"]
    programs[0]["cubins"].pop("ptx", None)
    rewrite_manifest(folder, programs=programs)
    return folder


@pytest.mark.slow  # as everything that needs PTX
def test_a_newer_gpu_runs_the_ptx_and_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "open_library", lambda: FakeCuda(LLAMA, capability=(10, 0)))
    engine = load_engine(LLAMA, kv_memory_bytes=1 << 20)
    engine.close()
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "has cubins for sm_90, so the driver compiles its PTX" in warning
    assert warning.endswith(f"inferc compile MODEL -o {LLAMA} --add-target --target cuda:sm_100")


def test_no_code_for_this_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = without_ptx(tmp_path / "out")
    monkeypatch.setattr(driver, "open_library", lambda: FakeCuda(folder, capability=(8, 9)))
    with pytest.raises(UnsupportedError) as error:
        load_engine(folder)
    assert str(error.value) == (
        "the artifact has cubins for sm_90; this GPU (Fake GPU) needs sm_89;"
        f" add it: inferc compile MODEL -o {folder} --add-target --target cuda:sm_89"
    )


def test_a_gpu_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    message, _ = refused(monkeypatch, UnsupportedError, {"capability": (7, 5)})
    assert message == "Fake GPU is sm_75, kernels are compiled for sm_80 and later; use --target cpu"


def test_a_driver_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    message, _ = refused(monkeypatch, UnsupportedError, {"version": 11080})
    assert re.search(r"driver is too old: it knows CUDA 11\.8, the artifact's kernels need CUDA 12\.0; update", message)


@pytest.mark.parametrize(
    ("capability", "by", "what_to_do"),
    [
        pytest.param(
            (12, 0),
            "sm_80",
            f"inferc compile MODEL -o {LLAMA} --add-target --target cuda:sm_120",
            marks=pytest.mark.slow,
        ),
        pytest.param((12, 1), "sm_80", "inferc has no kernels for sm_121, use --target cpu", marks=pytest.mark.slow),
        ((9, 0), "sm_90", "use --target cpu"),
    ],
)
def test_kernels_that_need_more_shared_memory_than_there_is(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], by: str, what_to_do: str
) -> None:
    options = {"capability": capability, "max_shared_bytes": 8192}
    message, fake = refused(monkeypatch, UnsupportedError, options)
    found = re.fullmatch(
        r"(\S+) \((sm_\d+)\) takes (\d+) bytes of shared memory a block, Fake GPU has 8192; (.*)", message
    )
    assert found, message
    assert found[2] == by and int(found[3]) > 8192 and found[4].endswith(what_to_do)
    assert UnsupportedError.exit_code == 2
    assert not fake.device and not fake.calls["cuModuleLoadData"], "nothing was loaded"


def test_too_little_memory_says_how_much_and_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: dict[str, Any] = {"kv_memory_bytes": 64 << 20, "max_num_seqs": 2048}
    far = 300 << 20
    message, _ = refused(monkeypatch, ConfigError, {"total_bytes": far}, **wanted)
    needed = far + int(message.partition(" bytes less")[0].rpartition(" ")[2])
    total = needed - (1 << 20)
    message, fake = refused(monkeypatch, ConfigError, {"total_bytes": total}, **wanted)
    assert not fake.device, "nothing was allocated"
    assert f"{needed - total} bytes less than are needed" in message
    settings = re.findall(r"--([a-z-]+) (\d+)(MiB)?(?: --max-num-seqs (\d+))? fits", message)
    assert len(settings) == 3, message
    names = {
        "kv-memory": "kv_memory_bytes",
        "max-num-seqs": "max_num_seqs",
        "max-num-batched-tokens": "max_num_batched_tokens",
    }
    for name, value, unit, seqs in settings:
        options = {**wanted, names[name]: int(value) << (20 if unit else 0)}
        if seqs:
            options["max_num_seqs"] = int(seqs)
        monkeypatch.setattr(driver, "open_library", lambda: FakeCuda(LLAMA, total_bytes=total))
        load_engine(LLAMA, **options).close()
    refused(monkeypatch, ConfigError, {"total_bytes": needed - 1}, **wanted)
    monkeypatch.setattr(driver, "open_library", lambda: FakeCuda(LLAMA, total_bytes=needed))
    load_engine(LLAMA, **wanted).close()


def test_memory_that_no_setting_makes_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    message, _ = refused(monkeypatch, ConfigError, {"total_bytes": 250 << 20})
    assert message.endswith("no setting makes it fit: quantize the weights, or use a GPU with more memory")
