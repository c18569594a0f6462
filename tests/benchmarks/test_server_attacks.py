"""Attacks on a server: what is told of each."""

from pathlib import Path

import pytest
import server_attacks
import server_soak


@pytest.mark.slow
def test_an_attack_is_told_with_what_health_waited(tiny_artifact: Path) -> None:
    result = server_attacks.run_all(tiny_artifact, ["invalid elements, 0.9 MB", "integers of thousands of digits"])
    first, second = result["attacks"]
    assert (first["attack"], first["answered"]) == ("invalid elements, 0.9 MB", "400")
    assert second["answered"] == "36x400 3xINVALID_ARGUMENT"
    assert all(row["asked"] > 0 and 0 < row["health_http_ms"] < 30_000 for row in result["attacks"])
    assert result["tracebacks"] == 0 and result["exit_code"] == 0


@pytest.mark.slow
def test_a_soak_says_what_grew_and_what_health_waited(tiny_artifact: Path) -> None:
    result = server_soak.run(tiny_artifact, streams=8, seconds=6.0, attacks=True)
    assert result["failed"] == {} and result["completed"] > 8
    assert result["attacks"]["clients that leave"] == {"left": 1}
    assert 0 < result["health_ms"]["http"]["p50"] <= result["health_ms"]["http"]["max"]
    for role in ("server", "engine_process"):
        assert all(each > 0 for pair in result["grew"][role].values() for each in pair), role
    assert result["tracebacks"] == 0 and result["exit_code"] == 0
