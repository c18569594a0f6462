"""The comparison of a batch with one request tapped and with none: every turn counts but the first."""

from pathlib import Path

import taps


def test_turns_are_counted_and_compared(tiny_artifact: Path) -> None:
    result = taps.compare(tiny_artifact, ["layers.*.attention.out"], 3, (5, 6), 2, 1)
    assert len(result["untapped_ms"]) == len(result["tapped_ms"]) == 2
    assert min(*result["untapped_ms"], *result["tapped_ms"]) > 0
    ratios = sorted(own / other for own, other in zip(result["tapped_ms"], result["untapped_ms"], strict=True))
    assert ratios[0] - 0.01 <= result["ratio"] <= ratios[-1] + 0.01
