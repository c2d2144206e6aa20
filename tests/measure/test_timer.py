"""Timer, guard and rematch on a clock that the test moves: no real time is measured."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, cycle, repeat

import pytest

from raftune.measure.guard import ContentionGuard
from raftune.measure.rematch import MIN_ROUNDS, interleave
from raftune.measure.timer import BATCH_NS, calls_per_batch, run_batch, time_call
from raftune.measurement import Policy, Status


class FakeClock:
    """Moves only when a fake kernel runs; every look at it costs 50 ns, as on a real machine."""

    def __init__(self) -> None:
        self.now = 0
        self.used = 0

    def wall(self) -> int:
        self.now += 50
        self.used += 50
        return self.now

    def cpu(self) -> int:
        return self.used

    def kernel(self, times_ns: Iterable[float], stolen_ns: Iterable[float] = repeat(0)) -> Callable[[], None]:
        times, stolen = iter(times_ns), iter(stolen_ns)

        def call() -> None:
            busy, away = int(next(times)), int(next(stolen))
            self.now += busy + away
            self.used += busy

        return call


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_short_kernels_are_batched_and_long_ones_are_not(clock: FakeClock) -> None:
    assert calls_per_batch(clock.kernel(repeat(BATCH_NS)), clock=clock) == 1
    inner = calls_per_batch(clock.kernel(repeat(200)), clock=clock)
    assert BATCH_NS / 200 <= inner <= 2 * BATCH_NS / 200
    assert run_batch(clock.kernel(repeat(200)), inner, clock).ns == pytest.approx(200, rel=0.01)


def test_a_cold_first_call_does_not_pass_for_a_slow_kernel(clock: FakeClock) -> None:
    cold = chain([8_000_000], repeat(200))
    assert calls_per_batch(clock.kernel(cold), clock=clock) >= BATCH_NS / 200


def test_steady_kernel_stops_at_the_stated_precision(clock: FakeClock) -> None:
    timing = timed(clock, repeat(1_000_000), Policy())
    assert timing.estimate is not None
    assert timing.estimate.value == pytest.approx(1e6, rel=1e-3)
    assert timing.estimate.within(0.02)
    assert 10 <= timing.clean <= 20
    assert timing.dropped == 0


def test_noisy_kernel_is_repeated_until_the_interval_is_narrow(clock: FakeClock) -> None:
    source = random.Random(0)
    noisy = (1_000_000 * (1 + 0.3 * source.random()) for _ in iter(int, 1))
    timing = timed(clock, noisy, Policy(max_seconds=60.0))
    assert timing.estimate is not None
    assert timing.estimate.within(0.02)
    assert timing.clean > 20
    assert timing.estimate.value == pytest.approx(1.075e6, rel=0.03)


def test_max_seconds_and_max_repeats_end_the_timing(clock: FakeClock) -> None:
    spread = cycle([1_000_000, 3_000_000, 2_000_000])
    limited = timed(clock, spread, Policy(max_seconds=0.05, precision=0.0))
    assert 20 <= limited.clean <= 40
    counted = timed(clock, spread, Policy(max_seconds=60.0, max_repeats=40, precision=0.0))
    assert 40 <= counted.clean < 60  # to the end of a slice
    slow = timed(clock, repeat(2_000_000_000), Policy(max_seconds=0.5))
    assert slow.clean == 3


def test_batches_without_the_core_are_dropped(clock: FakeClock) -> None:
    # Every third batch loses the core for 8 ms.
    timing = timed(clock, repeat(1_000_000), Policy(), stolen_ns=cycle([0, 0, 8_000_000]))
    assert timing.estimate is not None
    assert timing.estimate.high == pytest.approx(1e6, rel=1e-3)
    assert timing.dropped > 0
    hopeless = timed(clock, repeat(1_000_000), Policy(), stolen_ns=repeat(1_000_000))
    assert hopeless.estimate is None
    assert hopeless.clean == 0


def phases(clock: FakeClock, *lengths_ns: int) -> Callable[[], bool]:
    """Whether the processor is in a disturbed phase: quiet and disturbed ones alternate, quiet after the last."""
    starts = [sum(lengths_ns[: i + 1]) for i in range(len(lengths_ns))]
    return lambda: sum(clock.now >= start for start in starts) % 2 == 1


def two_speeds(clock: FakeClock, time_ns: int, disturbed: Callable[[], bool]) -> Callable[[], None]:
    def call() -> None:
        busy = time_ns * (2 if disturbed() else 1)
        clock.now += busy
        clock.used += busy

    return call


def guard_over(clock: FakeClock, disturbed: Callable[[], bool]) -> ContentionGuard:
    def sleep(seconds: float) -> None:
        clock.now += int(seconds * 1e9)

    return ContentionGuard(clock, two_speeds(clock, 80_000, disturbed), sleep)


SECOND = 1_000_000_000


def test_disturbed_phases_do_not_enter_a_timing(clock: FakeClock) -> None:
    disturbed = phases(clock, SECOND // 10, SECOND // 2, SECOND // 50, SECOND)
    guard = guard_over(clock, disturbed)
    timing = time_call(two_speeds(clock, 3_000_000, disturbed), Policy(min_repeats=40), guard, clock)
    assert timing.estimate is not None
    assert timing.estimate.high == pytest.approx(3e6, rel=1e-3)
    assert timing.clean >= 40
    assert timing.dropped > 0


def test_a_machine_that_stays_disturbed_is_timed_as_it_is_and_says_so(clock: FakeClock) -> None:
    disturbed = phases(clock, SECOND // 10)
    guard = guard_over(clock, disturbed)
    clock.now += SECOND
    start = clock.now
    timing = time_call(two_speeds(clock, 1_000_000, disturbed), Policy(), guard, clock)
    assert timing.estimate is not None
    assert timing.estimate.value == pytest.approx(2e6, rel=1e-3)
    assert not timing.quiet
    assert guard.slowdown == pytest.approx(2.0, rel=0.01)
    assert clock.now - start < 3 * SECOND


def test_guard_accepts_a_machine_that_became_slower_for_good(clock: FakeClock) -> None:
    disturbed = phases(clock, SECOND // 10)
    guard = guard_over(clock, disturbed)
    clock.now += SECOND
    assert not guard.wait(clock.now + 5 * SECOND)
    assert guard.wait(clock.now + 40 * SECOND)
    assert guard.reference_ns == pytest.approx(160_000, rel=0.01)


def test_guard_that_started_in_a_disturbed_phase_is_told_better(clock: FakeClock) -> None:
    guard = guard_over(clock, lambda: True)
    assert guard.quiet()
    guard.believe(80_000)
    assert not guard.quiet()


def test_a_disturbance_that_lasts_does_not_change_a_ratio(clock: FakeClock) -> None:
    disturbed = phases(clock, SECOND // 10)
    guard = guard_over(clock, disturbed)
    clock.now += SECOND
    default, fast = (two_speeds(clock, time_ns, disturbed) for time_ns in (3_000_000, 2_400_000))
    (result,) = interleave(default, [fast], Policy(), lambda _: None, guard, clock)
    assert result.status is Status.OK
    assert result.ratio == pytest.approx(0.8, rel=0.01)


def timed(clock: FakeClock, times_ns: Iterable[float], policy: Policy, stolen_ns: Iterable[float] = repeat(0)):
    return time_call(clock.kernel(times_ns, stolen_ns), policy, guard_over(clock, lambda: False), clock)


def race(clock: FakeClock, *contenders: Callable[[], None], policy: Policy | None = None, order: list[int] | None = None):
    announce = (order if order is not None else []).append
    return interleave(
        clock.kernel(repeat(1_000_000)), contenders, policy or Policy(), announce, guard_over(clock, lambda: False), clock
    )


def test_rematch_ratio_and_bound(clock: FakeClock) -> None:
    faster, same = race(clock, clock.kernel(repeat(800_000)), clock.kernel(repeat(1_000_000)))
    assert faster.status is same.status is Status.OK
    assert faster.rounds == 15
    assert faster.time_us == pytest.approx(800, rel=1e-3)
    assert faster.default_us == pytest.approx(1000, rel=1e-3)
    assert faster.ratio == pytest.approx(0.8, rel=1e-3)
    assert faster.ratio <= faster.ratio_high <= 0.81
    assert same.ratio == pytest.approx(1.0, rel=1e-3)


def test_rematch_of_a_drifting_machine_is_fair(clock: FakeClock) -> None:
    # Everything becomes slower by a thousandth with each call of either kernel: 1.1 times in the end.
    speed = [1.0]

    def drifting(base_ns: float) -> Iterator[float]:
        while True:
            speed[0] *= 1.001
            yield base_ns * speed[0]

    (result,) = interleave(
        clock.kernel(drifting(5e6)),
        [clock.kernel(drifting(5e6))],
        Policy(rematch_rounds=15),
        lambda _: None,
        guard_over(clock, lambda: False),
        clock,
    )
    assert result.ratio == pytest.approx(1.0, abs=0.003)
    assert result.ratio_high > 0.99


def test_rematch_turns_are_mixed(clock: FakeClock) -> None:
    order: list[int] = []
    race(clock, clock.kernel(repeat(900_000)), order=order)
    first_of_round = order[3::2]
    assert set(first_of_round) == {-1, 0}
    assert len(first_of_round) == 15


def test_every_turn_takes_as_long_as_the_others(clock: FakeClock) -> None:
    """The best of many short batches against one long call would favour a fast kernel by the noise it escapes."""
    counts = {"default": 0, "fast": 0}

    def counted(name: str, time_ns: float) -> Iterator[float]:
        while True:
            counts[name] += 1
            yield time_ns

    interleave(
        clock.kernel(counted("default", 10e6)),
        [clock.kernel(counted("fast", 1e6))],
        Policy(),
        lambda _: None,
        guard_over(clock, lambda: False),
        clock,
    )
    assert counts["fast"] == pytest.approx(10 * counts["default"], rel=0.2)


def test_a_disturbed_first_look_does_not_change_the_race(clock: FakeClock) -> None:
    (result,) = interleave(
        clock.kernel(repeat(50_000), chain([8_000_000, 8_000_000], repeat(0))),
        [clock.kernel(repeat(50_000), chain([9_000_000], repeat(0)))],
        Policy(),
        lambda _: None,
        guard_over(clock, lambda: False),
        clock,
    )
    assert result.time_us == pytest.approx(50, rel=1e-2)
    assert result.ratio == pytest.approx(1.0, rel=1e-3)


def test_disturbed_rounds_are_run_again_up_to_a_limit(clock: FakeClock) -> None:
    # A slow contender has one call a turn; every fourth is disturbed.
    (redone,) = race(clock, clock.kernel(repeat(3_000_000), cycle([0, 0, 0, 9_000_000])))
    assert redone.status is Status.OK
    assert redone.rounds == 15
    assert redone.ratio == pytest.approx(3.0, rel=1e-3)
    (noisy,) = race(clock, clock.kernel(repeat(3_000_000), repeat(9_000_000)))
    assert noisy.status is Status.NOISY
    assert noisy.ratio is None
    assert "0 of 30 rounds" in noisy.message


def test_slow_kernels_get_fewer_rounds(clock: FakeClock) -> None:
    (result,) = race(clock, clock.kernel(repeat(5_000_000_000)))
    assert result.rounds == MIN_ROUNDS
