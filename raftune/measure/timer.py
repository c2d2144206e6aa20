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
# As long a run without a look at the guard, and as long a wait for a quiet machine in all.
_SLICE_NS = 20_000_000
_PATIENCE_NS = 1_500_000_000
# CPU time over wall time of an undisturbed batch. Spinning helper threads hide part of a disturbance, never make one.
_CPU_SHARE = 0.95


class Clock(Protocol):
    """Two clocks in nanoseconds: time that passed, and processor time that this process got."""

    def wall(self) -> int: ...

    def cpu(self) -> int: ...


class Guard(Protocol):
    """What the timer asks of a contention guard; see :class:`raftune.measure.guard.ContentionGuard`."""

    def quiet(self) -> bool: ...

    def wait(self, deadline_ns: int) -> bool: ...

    def speed(self) -> float: ...


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
    """``estimate`` in nanoseconds, over the ``clean`` batches; ``None`` if there were fewer than :data:`MIN_CLEAN`.

    ``quiet``: the machine was undisturbed while they ran.
    """

    estimate: Estimate | None
    clean: int
    dropped: int
    quiet: bool


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


def time_call(call: Callable[[], Any], policy: Policy, guard: Guard, clock: Clock = SYSTEM_CLOCK) -> Timing:
    """Time ``call`` under ``policy``, in slices of some milliseconds, those preferred that ``guard`` finds quiet on both sides.

    Ends when the statistic is known to ``policy.precision``, after ``max_seconds`` of timing, or when waiting for quiet has
    taken too long; then what was timed on a disturbed machine counts, and ``quiet`` is false.
    """
    inner = calls_per_batch(call, clock=clock)
    give_up = clock.wall() + _PATIENCE_NS
    samples: list[float] = []
    disturbed: list[float] = []
    total, next_look, spent = 0, policy.min_repeats, 0
    quiet = False
    while total < policy.max_repeats:
        if not quiet:
            guard.wait(give_up)
        start = clock.wall()
        batches = [run_batch(call, inner, clock)]
        while clock.wall() - start < _SLICE_NS:
            batches.append(run_batch(call, inner, clock))
        spent += clock.wall() - start
        total += len(batches)
        quiet = guard.quiet()
        (samples if quiet else disturbed).extend(batch.ns for batch in batches if batch.clean)
        if spent >= policy.max_seconds * 1e9 and total >= MIN_CLEAN:
            break
        if len(samples) >= max(next_look, MIN_CLEAN):
            if quantile_estimate(samples, policy.quantile).within(policy.precision):
                break
            # Sorting at every slice would take longer than a slice.
            next_look = len(samples) + max(1, len(samples) // 8)
    was_quiet = len(samples) >= MIN_CLEAN
    used = samples if was_quiet else samples + disturbed
    estimate = quantile_estimate(used, policy.quantile) if len(used) >= MIN_CLEAN else None
    return Timing(estimate, len(used), total - len(used), was_quiet)
