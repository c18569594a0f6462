"""The benchmark of decoding with experts: what it counts, on one small model."""

from pathlib import Path

import moe_decode
import pytest

from inferc.runtime.artifact.load import load_artifact

pytestmark = pytest.mark.slow

SHAPE = moe_decode.Shape(hidden=64, expert=32, layers=2, top_k=2)
BYTES_OF_ONE = 3 * 64 * 32 * 2  # an expert's gate, up and down in bfloat16


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact of SHAPE with four experts."""
    work = tmp_path_factory.mktemp("moe")
    made = moe_decode.prepare(SHAPE, 4, "bfloat16", work)
    at = made.stat().st_mtime_ns
    assert moe_decode.prepare(SHAPE, 4, "bfloat16", work).stat().st_mtime_ns == at, "made once"
    return made


@pytest.mark.slow
def test_a_step_reads_the_chosen_experts(path: Path) -> None:
    one = moe_decode.row_of(4, "bfloat16", path, [0.5, 0.25, 1.0], read=1e9, steps=3, batch=1)
    assert one["experts_a_step"] == 2 * 2, "two experts in each of two layers"
    assert one["predicted_mb"] == one["counted_mb"] > 0
    assert one["ms"] == 500.0 and one["all_ms"] == [500.0, 250.0, 1000.0]
    assert moe_decode.run_once(path, steps=2, batch=1) > 0


def test_each_step_of_several_sequences_is_counted(path: Path) -> None:
    routing = moe_decode.Routing(load_artifact(path))
    moe_decode.run_once(path, steps=3, batch=4, routing=routing)
    first, second = (len(counts) for counts in routing.counts.values())
    assert 2 <= first == second, "of every layer in every step"
    assert 4 < routing.per_step() <= 8, "four tokens choose more of the four experts than one does"


def test_the_cost_is_that_of_the_chosen_experts(path: Path) -> None:
    artifact = load_artifact(path)
    predicted, counted = moe_decode.bytes_of_step(artifact, 40, 1, 4.0)
    assert counted == pytest.approx(predicted)
    again, with_all = moe_decode.bytes_of_step(artifact, 40, 1, 8.0)
    assert again == predicted
    assert with_all - counted == pytest.approx(4 * BYTES_OF_ONE)
