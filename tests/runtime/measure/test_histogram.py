"""The histogram of measurements."""

import math

from inferc.runtime.measure.histogram import Histogram


def test_a_histogram_counts_by_inclusive_upper_bounds() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    for value in (0.5, 1.0, 1.5, 4.0, 9.0):
        histogram.observe(value)
    histogram.observe(3.0, 2)
    assert (histogram.counts, histogram.count, histogram.sum) == ([2, 1, 3, 1], 7, 22.0)
    assert (histogram.quantile(1.0), histogram.quantile(3 / 7)) == (4.0, 2.0)
    assert math.isnan(Histogram((1.0,)).quantile(0.5))
