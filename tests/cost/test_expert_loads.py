"""Profiles of the tokens that experts got: added up, written, read, and refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferc.cost.expert_loads import ExpertLoads
from inferc.errors import ConfigError, UnsupportedError
from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.engine.load import load_engine
from inferc.runtime.measure.expert_loads import record_loads


def test_counts_of_steps_are_added_and_come_back_from_a_file(tmp_path: Path) -> None:
    loads = ExpertLoads()
    loads.add(1, [3, 0, 2])
    loads.add(0, [0, 0, 5])
    loads.add(1, [1, 1, 0])
    loads.save(tmp_path / "loads.json")
    assert ExpertLoads.load(tmp_path / "loads.json") == loads == ExpertLoads({1: [4, 1, 2], 0: [0, 0, 5]})
    assert (tmp_path / "loads.json").read_text().startswith('{"expert_loads": {"0": ')


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"\xff", "cannot read .*: not UTF-8 text"),
        (None, "cannot read .*: No such file"),
        (b"[]", "no load profile"),
        (b'{"expert_loads": {"0": ["many"]}}', "no load profile"),
        (b'{"expert_loads": {"0": [-1]}}', "a load is negative; expected numbers of tokens"),
    ],
)
def test_what_is_no_profile_is_told(text: bytes | None, told: str, tmp_path: Path) -> None:
    path = tmp_path / "loads.json"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(ConfigError, match=told):
        ExpertLoads.load(path)


def test_a_model_without_experts_has_no_loads(tiny_artifact: Path) -> None:
    artifact = load_artifact(tiny_artifact)
    engine = load_engine(artifact, max_num_seqs=1, max_num_batched_tokens=16, kv_memory_bytes=1 << 20, num_threads=1)
    try:
        with pytest.raises(UnsupportedError, match="has no experts whose loads could be recorded"):
            record_loads(artifact, engine)
    finally:
        engine.close()
