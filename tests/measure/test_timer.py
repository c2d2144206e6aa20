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
    timing = time_call(clock.kernel(repeat(1_000_000)), Policy(), clock)
    assert timing.estimate is not None
    assert timing.estimate.value == pytest.approx(1e6, rel=1e-3)
    assert timing.estimate.within(0.02)
    assert 10 <= timing.clean <= 20
    assert timing.dropped == 0


def test_noisy_kernel_is_repeated_until_the_interval_is_narrow(clock: FakeClock) -> None:
    source = random.Random(0)
    noisy = (1_000_000 * (1 + 0.3 * source.random()) for _ in iter(int, 1))
    timing = time_call(clock.kernel(noisy), Policy(max_seconds=60.0), clock)
    assert timing.estimate is not None
    assert timing.estimate.within(0.02)
    assert timing.clean > 20
    assert timing.estimate.value == pytest.approx(1.075e6, rel=0.03)


def test_max_seconds_and_max_repeats_end_the_timing(clock: FakeClock) -> None:
    spread = cycle([1_000_000, 3_000_000, 2_000_000])
    limited = time_call(clock.kernel(spread), Policy(max_seconds=0.05, precision=0.0), clock)
    assert 20 <= limited.clean <= 30
    counted = time_call(clock.kernel(spread), Policy(max_seconds=60.0, max_repeats=40, precision=0.0), clock)
    assert counted.clean == 40
    slow = time_call(clock.kernel(repeat(2_000_000_000)), Policy(max_seconds=0.5), clock)
    assert slow.clean == 3


def test_batches_without_the_core_are_dropped(clock: FakeClock) -> None:
    # Every third batch loses the core for 8 ms.
    timing = time_call(clock.kernel(repeat(1_000_000), cycle([0, 0, 8_000_000])), Policy(), clock)
    assert timing.estimate is not None
    assert timing.estimate.high == pytest.approx(1e6, rel=1e-3)
    assert timing.dropped > 0
    hopeless = time_call(clock.kernel(repeat(1_000_000), repeat(1_000_000)), Policy(), clock)
    assert hopeless.estimate is None
    assert hopeless.clean == 0


def guard_of(clock: FakeClock, probes_ns: Iterator[float]) -> ContentionGuard:
    return ContentionGuard(clock, clock.kernel(probes_ns))


def test_guard_believes_a_quiet_machine(clock: FakeClock) -> None:
    pauses: list[float] = []
    guarded = guard_of(clock, repeat(1_000_000)).run(lambda: "time", lambda _: None, pauses.append)
    assert (guarded.value, guarded.disturbance, pauses) == ("time", None, [])


def test_guard_measures_again_after_a_disturbance(clock: FakeClock) -> None:
    values = iter(["disturbed", "quiet"])
    pauses: list[float] = []
    # The first probe of three calls, the one before the timing, and then one that ran at half the speed.
    probes = chain(repeat(1_000_000, 6), repeat(2_000_000, 3), repeat(1_000_000))
    guarded = guard_of(clock, probes).run(lambda: next(values), lambda _: None, pauses.append)
    assert (guarded.value, guarded.disturbance) == ("quiet", None)
    assert len(pauses) == 1


def test_guard_gives_up_after_three_attempts(clock: FakeClock) -> None:
    calls: list[int] = []
    guard = guard_of(clock, repeat(1_000_000))
    guarded = guard.run(lambda: calls.append(1), lambda _: "half of the batches were lost", lambda _: None)
    assert guarded.disturbance == "half of the batches were lost"
    assert len(calls) == 3


def test_guard_stops_waiting_on_a_machine_that_stays_disturbed(clock: FakeClock) -> None:
    guard = guard_of(clock, repeat(1_000_000))
    pauses: list[float] = []
    for _ in range(5):
        guard.run(lambda: None, lambda _: "lost", pauses.append)
    assert len(pauses) == 3 * 2
    guard.run(lambda: None, lambda _: None, pauses.append)
    guard.run(lambda: None, lambda _: "lost", pauses.append)
    assert len(pauses) == 4 * 2


def test_guard_accepts_a_machine_that_became_slower_for_good(clock: FakeClock) -> None:
    guard = guard_of(clock, chain(repeat(1_000_000, 3), repeat(2_000_000)))
    first = guard.run(lambda: None, lambda _: None, lambda _: None)
    assert first.disturbance == "the processor ran 2.0 times slower than it did before"
    later = [guard.run(lambda: None, lambda _: None, lambda _: None).disturbance for _ in range(3)]
    assert later[-1] is None


def race(clock: FakeClock, *contenders: Callable[[], None], policy: Policy | None = None, order: list[int] | None = None):
    announce = (order if order is not None else []).append
    return interleave(clock.kernel(repeat(1_000_000)), contenders, policy or Policy(), announce, clock)


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
        clock.kernel(drifting(5e6)), [clock.kernel(drifting(5e6))], Policy(rematch_rounds=15), lambda _: None, clock
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

    interleave(clock.kernel(counted("default", 10e6)), [clock.kernel(counted("fast", 1e6))], Policy(), lambda _: None, clock)
    assert counts["fast"] == pytest.approx(10 * counts["default"], rel=0.2)


def test_a_disturbed_first_look_does_not_change_the_race(clock: FakeClock) -> None:
    (result,) = interleave(
        clock.kernel(repeat(50_000), chain([8_000_000, 8_000_000], repeat(0))),
        [clock.kernel(repeat(50_000), chain([9_000_000], repeat(0)))],
        Policy(),
        lambda _: None,
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
