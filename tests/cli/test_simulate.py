"""`inferc simulate` on a trace of a few requests."""

import json
from pathlib import Path

import pytest
from command_line import run_inferc


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 requests in 20 seconds, in two of which every other prompt begins alike."""
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    rows = []
    for i in range(40):
        ids = [0, 100 + i] if i % 2 else [200 + i, 300 + i]
        rows.append({"timestamp": 500 * i, "input_length": 900, "output_length": 10 + i, "hash_ids": ids})
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_policies_and_loads_side_by_side(trace: Path, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    options = ("--policy", "fcfs", "--policy", "static", "--speed", "0.2", "--speed", "1", "--scale", "8")
    done = run_inferc("simulate", "--trace", trace, *options, "--ttft-ms", "2000", "--plot", picture, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [(row["policy"], row["speed"]) for row in found["rows"]] == [
        ("fcfs", 0.2),
        ("fcfs", 1.0),
        ("static", 0.2),
        ("static", 1.0),
    ]
    assert found["requests"] == 40 and found["scale"] == 8
    assert found["ideal_hit_rate"] == pytest.approx(19 * 64 / (40 * 112))
    for row in found["rows"]:
        assert 0 <= row["hit_rate"] <= found["ideal_hit_rate"] and row["tbt_p50"] > 0
        assert row["ttft_p50"] <= row["ttft_p99"] and 0 <= row["goodput"] <= 1
    assert picture.stat().st_size > 20_000


def test_a_table_for_people(trace: Path) -> None:
    done = run_inferc("simulate", "--trace", trace, "--requests", "5", "--replicas", "2", "--no-prefix-cache")
    assert done.returncode == 0, done.stderr
    assert "5 requests in 2 s, 4500 tokens of prompts, 60 of answers; 2 x qwen3-0.6b" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("fcfs")]
    assert " 0.0% " in line and "TTFT ms mean" in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--policy", "best"), "policy is 'best', expected one of fcfs"),
        (("--scale", "3"), "scale is 3, expected a divisor of 512"),
        (("--speed", "0"), "--speed 0: expected a number above 0"),
        (("--replicas", "0"), "--replicas 0: expected 1 to 1024"),
        (("--kv-tokens", "100"), "the trace's longest sequence may have 949 tokens, and the KV cache holds 128"),
        (("--save-cost", "x.json"), "--save-cost keeps what --engine measures"),
        (("--cost", "no-file.json"), "cannot read the cost file no-file.json"),
        (("--engine", "out", "--cost", "x"), "leave one out"),
        (("--plot", "picture.gif"), "expected a file named .png"),
        (("--max-num-batched-tokens", "8"), "max_num_batched_tokens 8 is less than max_num_seqs"),
    ],
)
def test_bad_values(trace: Path, options: tuple[str, ...], message: str) -> None:
    done = run_inferc("simulate", "--trace", trace, *options)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("inferc: ") and message in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_impossible_rows_are_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 10, "output_length": 0}\n')
    done = run_inferc("simulate", "--trace", path)
    assert done.returncode == 2 and "line 1: output_length: expected a number in [1" in done.stderr


def test_costs_of_an_artifact_are_measured_and_used_again(trace: Path, tiny_artifact: Path, tmp_path: Path) -> None:
    cost = tmp_path / "cost.json"
    options = ("--scale", "64", "--max-num-seqs", "4", "--seconds", "1", "--json")
    first = run_inferc("simulate", "--trace", trace, "--engine", tiny_artifact, "--save-cost", cost, *options)
    assert first.returncode == 0, first.stderr
    again = run_inferc("simulate", "--trace", trace, "--cost", cost, *options)
    assert json.loads(again.stdout) == json.loads(first.stdout), "a simulation has no chance in it"
