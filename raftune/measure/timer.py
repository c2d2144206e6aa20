"""Timing one kernel: batches long enough for the clock, disturbed batches left out, repeats until the statistic is known.

The caches stay warm, as they are for most of an operator's inputs within a training step. A batch that got less CPU time than
wall time ran while the cores were taken away, so it says nothing about the kernel and is dropped; what is left still has
one-sided noise (frequency, shared caches), which a low quantile resists.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Protocol

from raftune.measure.stats import Estimate, quantile_estimate
from raftune.measurement import Policy

# A batch this long makes reading the clocks (below 1 us) and the loop invisible.
BATCH_NS = 100_000
# Below this many clean batches there is no statement to make.
MIN_CLEAN = 3
# Building a primitive at the first call, or losing the core for some scheduler ticks, takes less than this.
_ACCIDENT_NS = 20_000_000
# CPU time over wall time of an undisturbed batch. Spinning helper threads hide part of a disturbance, never make one.
_CPU_SHARE = 0.95


class Clock(Protocol):
    """Two clocks in nanoseconds: time that passed, and processor time that this process got."""

    def wall(self) -> int: ...

    def cpu(self) -> int: ...


class SystemClock:
    def wall(self) -> int:
        return time.perf_counter_ns()

    def cpu(self) -> int:
        return time.process_time_ns()


SYSTEM_CLOCK = SystemClock()


@dataclass(frozen=True, slots=True)
class Batch:
    """``ns`` is the mean time of one call; ``clean`` says that no one took the core away meanwhile."""

    ns: float
    clean: bool


@dataclass(frozen=True, slots=True)
class Timing:
    """``estimate`` in nanoseconds, over the clean batches; ``None`` if there were fewer than :data:`MIN_CLEAN`."""

    estimate: Estimate | None
    clean: int
    dropped: int


def run_batch(call: Callable[[], Any], inner: int, clock: Clock = SYSTEM_CLOCK) -> Batch:
    """Time ``inner`` calls as one batch."""
    # The CPU clock is read outside the wall clock's interval: an undisturbed batch then has at least its wall time.
    cpu_start = clock.cpu()
    start = clock.wall()
    for _ in repeat(None, inner):
        call()
    wall = clock.wall() - start
    cpu = clock.cpu() - cpu_start
    return Batch(wall / inner, cpu >= _CPU_SHARE * wall)


def best_of(call: Callable[[], Any], inner: int, clock: Clock = SYSTEM_CLOCK) -> float:
    """Nanoseconds of ``inner`` calls, the best of three: a cold or interrupted batch must not pass for a slow kernel.

    Something longer than any such accident is run once.
    """
    best = run_batch(call, inner, clock).ns
    if best * inner < _ACCIDENT_NS:
        best = min(best, *(run_batch(call, inner, clock).ns for _ in range(2)))
    return best * inner


def calls_per_batch(call: Callable[[], Any], batch_ns: int = BATCH_NS, clock: Clock = SYSTEM_CLOCK) -> int:
    """How many calls fill ``batch_ns``; running them warms the kernel up as well."""
    inner = 1
    while (elapsed := best_of(call, inner, clock)) < batch_ns:
        inner = max(inner + 1, min(10 * inner, math.ceil(inner * batch_ns / max(elapsed, 1.0))))
    return inner


def time_call(call: Callable[[], Any], policy: Policy, clock: Clock = SYSTEM_CLOCK) -> Timing:
    """Time ``call`` under ``policy``: ``min_repeats`` batches or more if ``max_seconds`` allow, and never fewer than three."""
    deadline = clock.wall() + int(policy.max_seconds * 1e9)
    inner = calls_per_batch(call, clock=clock)
    samples: list[float] = []
    total, next_look = 0, policy.min_repeats
    while total < policy.max_repeats:
        batch = run_batch(call, inner, clock)
        total += 1
        if batch.clean:
            samples.append(batch.ns)
        if total >= MIN_CLEAN and clock.wall() >= deadline:
            break
        if total >= next_look and len(samples) >= MIN_CLEAN:
            if quantile_estimate(samples, policy.quantile).within(policy.precision):
                break
            # Sorting at every sample would take longer than a short batch.
            next_look = total + max(1, total // 8)
    estimate = quantile_estimate(samples, policy.quantile) if len(samples) >= MIN_CLEAN else None
    return Timing(estimate, len(samples), total - len(samples))
