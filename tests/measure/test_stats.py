"""Order-statistic bounds against the binomial distribution summed exactly, and against simulated coverage."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest

from raftune.measure.stats import median_upper_bound, quantile_estimate


def cumulative(count: int, at_most: int, quantile: Fraction) -> Fraction:
    return sum((math.comb(count, k) * quantile**k * (1 - quantile) ** (count - k) for k in range(at_most + 1)), Fraction(0))


@pytest.mark.parametrize("count", [15, 20, 50, 200])
@pytest.mark.parametrize("quantile", [Fraction(1, 4), Fraction(1, 2)])
def test_interval_is_the_narrowest_with_its_confidence(count: int, quantile: Fraction) -> None:
    estimate = quantile_estimate([float(i) for i in reversed(range(count))], float(quantile))
    low, high = int(estimate.low), int(estimate.high)
    tail = Fraction(25, 1000)
    assert estimate.bounded
    assert cumulative(count, low, quantile) <= tail < cumulative(count, low + 1, quantile)
    assert 1 - cumulative(count, high, quantile) <= tail < 1 - cumulative(count, high - 1, quantile)
    assert estimate.value == math.floor(count * quantile)


def test_few_samples_give_no_interval() -> None:
    estimate = quantile_estimate([3.0, 1.0, 2.0], 0.25)
    assert (estimate.value, estimate.low, estimate.high, estimate.bounded) == (1.0, 1.0, 3.0, False)
    assert not estimate.within(10.0)
    with pytest.raises(ValueError, match="no samples"):
        quantile_estimate([], 0.5)


def test_large_counts_do_not_underflow() -> None:
    estimate = quantile_estimate([float(i) for i in range(20000)], 0.25)
    # The normal approximation: 5000 +- 1.96 * sqrt(20000 * 0.25 * 0.75).
    assert estimate.low == pytest.approx(4880, abs=2)
    assert estimate.high == pytest.approx(5120, abs=2)


def test_low_quantile_resists_one_sided_noise() -> None:
    source = random.Random(0)
    samples = [100 + source.random() + (900 if source.random() < 0.5 else 0) for _ in range(400)]
    estimate = quantile_estimate(samples, 0.25)
    assert 100 <= estimate.low <= estimate.value <= estimate.high <= 101
    assert estimate.within(0.01)


def test_coverage() -> None:
    source = random.Random(1)
    hits = 0
    for _ in range(2000):
        estimate = quantile_estimate([source.expovariate(1.0) for _ in range(30)], 0.25)
        hits += estimate.low <= -math.log(0.75) <= estimate.high
    assert hits / 2000 >= 0.94


def test_median_upper_bound() -> None:
    # Binomial(15, 1/2): P(at most 10) = 0.941, P(at most 11) = 0.982, so the twelfth smallest bounds the median.
    assert median_upper_bound([float(i) for i in range(1, 16)]) == 12.0
    assert median_upper_bound([2.0, 1.0, 4.0, 3.0]) == 4.0
