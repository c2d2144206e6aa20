"""Two or more ways to run one step, timed in turn in one process: only the ratio is trusted, never two separate clocks."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from raftune.measure.guard import ContentionGuard, same_speed
from raftune.measure.stats import median_upper_bound

ROUNDS = 21
_WARM_UP = 2
# Rounds are run again if the machine was disturbed, for this many seconds at most beyond what the rounds themselves take.
_PATIENCE_S = 20.0


@dataclass(frozen=True, slots=True)
class RaceResult:
    """Lower-quartile milliseconds of each side, and raftune over eager: the median over rounds of the pairwise ratio.

    ``ratio_high`` bounds the ratio from above with 95% confidence. ``rounds`` counts timed rounds.
    """

    eager_ms: float
    raftune_ms: float
    ratio: float
    ratio_high: float
    rounds: int

    @property
    def winner(self) -> str:
        """``raftune`` if it is the faster one beyond doubt, else ``eager``, which is what there was before."""
        return "raftune" if self.ratio_high < 1.0 else "eager"

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"winner": self.winner}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> RaceResult:
        """Raises ``KeyError``, ``TypeError``, ``OverflowError`` or ``ValueError`` if ``value`` is not a race."""
        times = {name: float(value[name]) for name in ("eager_ms", "raftune_ms", "ratio", "ratio_high")}
        if wrong := {name: time for name, time in times.items() if not 0.0 < time < math.inf}:
            raise ValueError(f"times and ratios must be positive, not {wrong}")
        return RaceResult(**times, rounds=int(value["rounds"]))


def interleave(
    sides: Mapping[str, Callable[[], object]], rounds: int = ROUNDS, guard: ContentionGuard | None = None
) -> dict[str, list[float]]:
    """Milliseconds of each side in each round. The order within a round alternates, so that a drift favours nobody.

    A round in which the processor's speed changed is run again while there is patience; without any left it counts.
    """
    guard = guard or ContentionGuard()
    for _ in range(_WARM_UP):
        for run in sides.values():
            run()
    times: dict[str, list[float]] = {name: [] for name in sides}
    patience = _PATIENCE_S
    for number in range(rounds):
        while True:
            start = time.perf_counter()
            found, steady = _round(sides, number % 2 == 1, guard)
            if steady or patience <= 0:
                break
            patience -= time.perf_counter() - start
        for name, milliseconds in found.items():
            times[name].append(milliseconds)
    return times


def race(eager: Callable[[], object], compiled: Callable[[], object]) -> RaceResult:
    """Race two steps. Both run on the caller's live state: restoring it is the caller's work."""
    return judge(interleave({"eager": eager, "raftune": compiled}))


def judge(times: Mapping[str, list[float]]) -> RaceResult:
    """The result of rounds timed by :func:`interleave` with the sides ``eager`` and ``raftune``."""
    ratios = [b / a for a, b in zip(times["eager"], times["raftune"], strict=True)]
    return RaceResult(
        eager_ms=lower_quartile(times["eager"]),
        raftune_ms=lower_quartile(times["raftune"]),
        ratio=statistics.median(ratios),
        ratio_high=median_upper_bound(ratios),
        rounds=len(ratios),
    )


def lower_quartile(values: list[float]) -> float:
    """Resists one-sided noise: something else on the machine can only make a step slower."""
    return statistics.quantiles(values, n=4)[0] if len(values) > 1 else values[0]


def _round(sides: Mapping[str, Callable[[], object]], reverse: bool, guard: ContentionGuard) -> tuple[dict[str, float], bool]:
    """One run of each side, and whether the processor ran at one speed throughout."""
    times: dict[str, float] = {}
    before = guard.speed()
    steady = True
    for name in list(sides)[:: -1 if reverse else 1]:
        start = time.perf_counter_ns()
        sides[name]()
        times[name] = (time.perf_counter_ns() - start) / 1e6
        steady &= same_speed(before, guard.speed())
    return times, steady
