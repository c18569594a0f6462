"""What `inferc bench serve` counts, and how numbers are shown."""

import pytest

from inferc.cli_bench import _shown
from inferc.serve.bench import Percentiles, _gaps


def test_every_token_after_the_first_message_has_its_share_of_a_gap() -> None:
    messages = [(0.50, 3), (0.70, 2), (1.00, 1)]
    assert _gaps(messages) == pytest.approx([0.1, 0.1, 0.3])
    assert _gaps([(0.5, 1), (0.6, 1), (0.8, 1)]) == pytest.approx([0.1, 0.2])
    assert _gaps([(0.5, 8)]) == []
    assert Percentiles.of_ms(_gaps(messages)).p50 == pytest.approx(100.0)


def test_numbers_that_are_not_known_are_shown_as_such() -> None:
    assert [_shown(value) for value in (None, 1234, 0.5, {"p50": 1.0, "p90": 2.0})] == [
        "unknown",
        "1,234",
        "0.500",
        "p50 1.000  p90 2.000",
    ]
