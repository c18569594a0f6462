"""`inferc bench tune` from end to end, what it refuses, and that `inferc serve` reads what it writes."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import run_inferc

from inferc.bench.candidates import Candidate
from inferc.bench.figures import Goals
from inferc.bench.tune import Tuned, _Clock
from inferc.bench.tune_report import write_config
from inferc.bench.verify import Row

DEFAULT = Candidate(64, 512)


def inferc(*arguments: str | Path, code: int = 0) -> tuple[str, str]:
    result = run_inferc(*arguments)
    assert result.returncode == code, result.stderr
    return result.stdout, result.stderr


def served_with(artifact: Path, config: Path) -> dict[str, str]:
    """Return the options that `inferc serve` takes from a configuration file."""
    out, _ = inferc("serve", artifact, "--config", config, "--print-config")
    lines = [line for line in out.splitlines() if line.endswith("# file")]
    return {key: value.rsplit("#")[0].strip() for key, value in (line.split(" = ", 1) for line in lines)}


def tuned_to(winner: Candidate) -> Tuned:
    rows = [Row(DEFAULT, 0, 10.0, measured_rung=0, measured=10.0)]
    if winner != DEFAULT:
        rows.append(Row(winner, 2, 12.0, measured_rung=1, measured=11.5))
    return Tuned(DEFAULT, rows, rows[-1], 10.0, "planted\nmachine, 2 cores", 0.1, [])


@pytest.mark.parametrize(
    "winner",
    [
        DEFAULT,
        Candidate(8, 256, "sjf", 50.0, prefix_cache=False, threads=1),
        replace(DEFAULT, policy="slo", tbt_ms=12.5),
    ],
    ids=["default", "all", "slo"],
)
def test_the_server_reads_what_is_written(winner: Candidate, tiny_artifact: Path, tmp_path: Path) -> None:
    path = tmp_path / "best.toml"
    write_config(
        path, tuned_to(winner), Goals(250.0, None, 0.9), "a model: its workload", "avx2" if winner.threads else "auto"
    )
    found = served_with(tiny_artifact, path)
    expected = {"goodput-ttft-ms": "250.0", "goodput-tbt-ms": "0.0"}
    expected |= {"max-num-seqs": str(winner.max_num_seqs), "policy": json.dumps(winner.policy)}
    expected |= {"max-num-batched-tokens": str(winner.max_num_batched_tokens)}
    expected |= {"prefix-cache": json.dumps(winner.prefix_cache)}
    expected |= {"tbt-ms": str(winner.tbt_ms)} if winner.tbt_ms is not None else {}
    expected |= {"threads": str(winner.threads), "isa": '"avx2"'} if winner.threads is not None else {}
    assert found == expected
    text = path.read_text()
    assert ("10 good requests/s" if winner == DEFAULT else "11.5 good requests/s") in text.splitlines()[0]
    assert ("clients send ttft_ms" in text) == (winner.policy == "slo")
    assert [each.name for each in tmp_path.iterdir()] == ["best.toml"]


@pytest.mark.slow
def test_from_steps_to_a_configuration(tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # However slow the machine is: each look at the clock finds that a tenth of a second of the 15 has gone.
    looks = itertools.count()
    monkeypatch.setattr(_Clock, "spent", property(lambda clock: 0.1 * next(looks)))
    config, picture = tmp_path / "best.toml", tmp_path / "found.png"
    trace = tmp_path / "TRACE"  # of so few requests that all loads are short
    rows = [{"timestamp": 100 * i, "input_length": 12, "output_length": 8, "hash_ids": [i]} for i in range(12)]
    trace.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options = ("--minutes", "0.25", "--measured", "1", "--trace", trace)
    goals = ("--ttft", "5000", "--tbt", "2000", "--share", "0.5", "--logprobs")
    out, _ = inferc("bench", "tune", tiny_artifact, *options, *goals, "-o", config, "--plot", picture, "--json")
    found: dict[str, Any] = json.loads(out)
    assert found["default"]["max_num_seqs"] == 64 and found["default"]["policy"] == "fcfs"
    first, *rest = found["candidates"]
    assert first["options"] == found["default"] and first["changes"] == {} and rest
    assert first["simulated"] > 0 and first["measured"] > 0
    assert found["winner"]["measured"] >= first["measured"]
    assert found["is_default_best"] == (found["winner"]["changes"] == {})
    for load in first["loads"]:
        assert (
            10 <= load["requests"] <= 12 and load["input_len"] == 12 and load["output_len"] == 8 and not load["failed"]
        )
    served = served_with(tiny_artifact, config)
    assert served["max-num-seqs"] == str(found["winner"]["options"]["max_num_seqs"])
    assert (served["goodput-ttft-ms"], served["goodput-tbt-ms"]) == ("5000.0", "2000.0")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert {each.name for each in tmp_path.iterdir()} == {"TRACE", "best.toml", "found.png"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--ttft", "0", "--tbt", "0"), "any time is good, so no rate is too high"),
        (("--ttft", "-1"), "--ttft -1: expected a number of milliseconds"),
        (("--share", "1.5"), "--share 1.5: expected a number above 0"),
        (("--minutes", "0"), "--minutes 0: expected more than 0"),
        (("--seconds", "nan"), "--seconds nan: expected more than 0"),
        (("--measured", "0"), "--measured 0: expected at least 1"),
        (("--seed", "-1"), "--seed -1: expected 0 or more"),
        (("--policy", "best"), "policy is 'best', expected one of fcfs"),
        (("--arrivals", "often"), "--arrivals often: expected one of poisson"),
        (("--input-len", "0"), "expected at least 1 of each"),
        (("--input-len", "250"), "together at most 256"),
        (("--output-len", "120", "--output-spread", "0.5"), "together at most 256"),
        (("--scale", "2"), "--scale is for --trace FILE"),
        (("--trace", "no-file"), "cannot read the trace no-file"),
        (("--trace", "TRACE"), "the trace's requests come all at once"),
        (("--trace", "TRACE", "--arrivals", "constant"), "--arrivals is for made-up requests"),
        (("-o", "best.json"), "-o best.json: expected a file named .toml"),
        (("-o", "no-folder/best.toml"), "in a folder that is there"),
        (("--plot", "found.gif"), "expected a file named .png"),
    ],
)
def test_what_cannot_be_is_one_line_and_leaves_nothing(
    options: tuple[str, ...], message: str, tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"timestamp": 0, "input_length": 16, "output_length": 4, "hash_ids": [1]}
    (tmp_path / "TRACE").write_text(2 * f"{json.dumps(row)}\n")
    given = () if "-o" in options else ("-o", "best.toml")
    out, error = inferc("bench", "tune", tiny_artifact, *given, *options, code=2)
    assert not out and error.startswith("inferc: ") and error.count("\n") == 1 and message in error, error
    assert [each.name for each in tmp_path.iterdir()] == ["TRACE"]


def test_no_artifact(tmp_path: Path) -> None:
    _, error = inferc("bench", "tune", tmp_path / "nothing", code=2)
    assert error.startswith("inferc: ") and error.count("\n") == 1


def test_objectives_that_not_even_lone_requests_keep(tiny_artifact: Path, tmp_path: Path) -> None:
    config = tmp_path / "best.toml"
    options = ("--ttft", "0.001", "--tbt", "0", "--minutes", "0.2", "--input-len", "12", "--output-len", "4")
    _, error = inferc("bench", "tune", tiny_artifact, *options, "-o", config, code=1)
    assert "within TTFT 0.001 ms where each has the engine for itself" in error and error.count("\n") == 1
    assert "allow more by --ttft" in error and not config.exists()


@pytest.mark.slow
def test_a_time_that_is_too_short_for_the_default(tiny_artifact: Path, tmp_path: Path) -> None:
    config = tmp_path / "best.toml"
    options = ("--minutes", "0.01", "--input-len", "12", "--output-len", "4", "-o", config)
    _, error = inferc("bench", "tune", tiny_artifact, *options, code=1)
    assert "--minutes 0.01 is too short to measure even the default" in error and not config.exists()


def test_its_help_says_what_is_judged_and_by_whom() -> None:
    out = " ".join(inferc("bench", "tune", "--help")[0].split())
    for text in (
        "most good requests per second",
        "engine's own scheduler",
        "real server",
        "beat the default by as much, twice",
    ):
        assert text in out
    assert "tune" in inferc("bench", "--help")[0]
