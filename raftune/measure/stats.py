"""Distribution-free statistics of timings: order statistics and their exact binomial confidence bounds.

The number of samples below the true q-quantile is Binomial(n, q), whatever the distribution of the samples, so a pair of order
statistics bounds the quantile with a known probability (Conover, Practical Nonparametric Statistics, section 3.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Estimate:
    """A quantile and its confidence interval, in the samples' unit. ``bounded``: there were enough samples for the interval."""

    value: float
    low: float
    high: float
    bounded: bool

    def within(self, precision: float) -> bool:
        """Whether the interval exists and lies within the fraction ``precision`` of the value, on both sides."""
        return self.bounded and max(self.high - self.value, self.value - self.low) <= precision * self.value


def quantile_estimate(samples: Sequence[float], quantile: float, confidence: float = 0.95) -> Estimate:
    """The ``quantile`` of at least one sample, with its two-sided interval (the extremes where there are too few samples)."""
    ordered = sorted(samples)
    count = len(ordered)
    if count == 0:
        raise ValueError("no samples")
    low, high = _interval_ranks(count, quantile, (1 - confidence) / 2)
    value = ordered[min(count - 1, math.floor(quantile * count))]
    bounded = low >= 0 and high < count
    return Estimate(value, ordered[max(low, 0)], ordered[min(high, count - 1)], bounded)


def median_upper_bound(samples: Sequence[float], confidence: float = 0.95) -> float:
    """One-sided upper bound of the median; the largest sample where there are too few (fewer than five at 95%)."""
    ordered = sorted(samples)
    _, high = _interval_ranks(len(ordered), 0.5, 1 - confidence)
    return ordered[min(high, len(ordered) - 1)]


@lru_cache(maxsize=4096)
def _interval_ranks(count: int, quantile: float, tail: float) -> tuple[int, int]:
    """Zero-based ranks of the order statistics that the quantile lies below, or above, with probability at most ``tail``.

    A rank of -1 or ``count`` says that no order statistic is far enough out.
    """
    low, high, below = -1, count, 0.0
    for rank in range(count + 1):
        # P(quantile < ordered[rank]) is P(at most ``rank`` samples lie below it).
        below += math.exp(
            math.lgamma(count + 1)
            - math.lgamma(rank + 1)
            - math.lgamma(count - rank + 1)
            + rank * math.log(quantile)
            + (count - rank) * math.log1p(-quantile)
        )
        if below <= tail:
            low = rank
        if below >= 1 - tail:
            high = min(high, rank)
            break
    return low, high
