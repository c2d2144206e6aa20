"""Interleaved rematch: candidates and default take turns in one process, so that what drifts, drifts for all of them."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from raftune.measure.guard import same_speed
from raftune.measure.stats import median_upper_bound
from raftune.measure.timer import SYSTEM_CLOCK, Clock, Guard, best_of, calls_per_batch, run_batch
from raftune.measurement import Policy, Rematch, Status

# A turn is the best of some batches of half a millisecond, or one batch as long as a call of a slow default.
_BATCH_NS = 500_000
_BATCHES = 4
# Fewer rounds than this do not bound a median usefully.
MIN_ROUNDS = 7
# A rematch takes at most this many times ``max_seconds``, unless the fewest rounds take longer.
_MAX_SHARE = 20.0


def interleave(
    default: Callable[[], Any],
    contenders: Sequence[Callable[[], Any]],
    policy: Policy,
    announce: Callable[[int], None],
    guard: Guard,
    clock: Clock = SYSTEM_CLOCK,
) -> list[Rematch]:
    """Race every contender against ``default`` over ``policy.rematch_rounds`` rounds; one result per contender, cost not set.

    Every turn has as many batches, filled with as many calls as take as long as the others', so that noise meets all alike; the
    order is random, so that a periodic disturbance does not stay with one of them. A turn during which the cores were taken
    away, or that ran at another speed of the processor than its round began with, does not count; rounds are added for it, at
    most as many again. A disturbance that lasts through a round slows all alike, so there is no waiting for quiet.
    ``announce`` is told who runs next: a contender's position, or -1 for the default. What a kernel raises is passed on.
    """
    calls = [default, *contenders]
    announce(-1)
    batch_ns = max(_BATCH_NS, math.ceil(best_of(default, 1, clock)))
    batches = _BATCHES if batch_ns < _BATCHES * _BATCH_NS else 1
    inner, round_ns = [], 0.0
    for index, call in enumerate(calls):
        announce(index - 1)
        inner.append(calls_per_batch(call, batch_ns, clock))
        round_ns += batches * best_of(call, inner[-1], clock)
    affordable = math.floor(_MAX_SHARE * policy.max_seconds * 1e9 / max(round_ns, 1.0))
    rounds = max(MIN_ROUNDS, min(policy.rematch_rounds, affordable))

    source = random.Random(0)
    pairs: list[list[tuple[float, float]]] = [[] for _ in contenders]
    for _ in range(2 * rounds):
        if all(len(p) >= rounds for p in pairs):
            break
        before = guard.speed()
        times: dict[int, float | None] = {}
        for index in source.sample(range(len(calls)), len(calls)):
            announce(index - 1)
            time_ns = _turn(calls[index], inner[index], batches, clock)
            times[index] = time_ns if same_speed(before, guard.speed()) else None
        default_ns = times[0]
        for index, found in enumerate(pairs, start=1):
            contender_ns = times[index]
            if default_ns is not None and contender_ns is not None:
                found.append((contender_ns, default_ns))
    return [_result(found, 2 * rounds) for found in pairs]


def _turn(call: Callable[[], Any], inner: int, batches: int, clock: Clock) -> float | None:
    """Nanoseconds of one call, or ``None`` if no batch had the core to itself."""
    if batches > 1:
        call()  # brings code and data back into the caches that the others used
    clean = [batch.ns for batch in (run_batch(call, inner, clock) for _ in range(batches)) if batch.clean]
    return min(clean, default=None)


def _result(pairs: Sequence[tuple[float, float]], tried: int) -> Rematch:
    if len(pairs) < MIN_ROUNDS:
        message = f"only {len(pairs)} of {tried} rounds had the cores to themselves, {MIN_ROUNDS} are needed"
        return Rematch(Status.NOISY, rounds=len(pairs), message=message)
    ratios = [time / default for time, default in pairs]
    return Rematch(
        Status.OK,
        time_us=statistics.median(time for time, _ in pairs) / 1e3,
        default_us=statistics.median(default for _, default in pairs) / 1e3,
        ratio=statistics.median(ratios),
        ratio_high=median_upper_bound(ratios),
        rounds=len(pairs),
    )
