"""The comparison of artifacts in one process: every turn counts but the first, ratios are to the first artifact."""

from pathlib import Path

import pytest
import side_by_side


def test_artifacts_run_in_turn(
    tiny_artifact: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_by_side, "measure_read", lambda threads: threads * 1e9)
    result = side_by_side.compare([tiny_artifact, tiny_artifact], (2, 5, 3), 2, 1)
    assert result["case"] == {"requests": 2, "input_len": 5, "output_len": 3} and result["read_gb_s"] == [1.0, 1.0]
    assert [len(row["runs"]) for row in result["rows"]] == [2, 2]
    assert all(run[unit] > 0 for row in result["rows"] for run in row["runs"] for unit in side_by_side.UNITS)
    for run in result["rows"][1]["runs"]:
        run["decode"] = 2 * result["rows"][0]["runs"][0]["decode"]
    result["rows"][0]["runs"][1] = result["rows"][0]["runs"][0]
    side_by_side.print_table(result)
    assert "(2.000)" in capsys.readouterr().out.splitlines()[2]
