"""Tests of what benchmarks/tensorrt_build.py says about plans."""

import pytest
import tensorrt_build


@pytest.mark.slow
def test_segments_hold_no_weights() -> None:
    (whole, _), (parts, seconds) = (
        tensorrt_build.built("tiny-draft", f"{target}:sm_89", "w8a8") for target in tensorrt_build.TARGETS
    )
    assert whole["num_plans"] == 1 and whole["weights_bytes"] == 0 and parts["num_plans"] == 3
    assert 0 < parts["plan_bytes"] < whole["plan_bytes"] and parts["weights_bytes"] > 500_000 and seconds > 0
    # Eight projections of rows in int8; the LM head too where it is TensorRT's.
    assert (parts["layers"]["quantize"], whole["layers"]["quantize"]) == (8, 9)
