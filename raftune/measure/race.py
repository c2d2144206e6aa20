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


EAGER, PLAN = "eager", "raftune"
"""The two sides of every race; any other side is a single compiler, called as its dialect is."""


@dataclass(frozen=True, slots=True)
class Single:
    """The step by a single compiler: lower-quartile milliseconds, its ratio over eager, and its ratio over the plan.

    The ratios are as in :class:`RaceResult`, each with its 95% bound from above.
    """

    ms: float
    ratio: float
    ratio_high: float
    over_plan: float
    over_plan_high: float


@dataclass(frozen=True, slots=True)
class RaceResult:
    """Lower-quartile milliseconds of each side, and raftune over eager: the median over rounds of the pairwise ratio.

    ``ratio_high`` bounds the ratio from above with 95% confidence. ``rounds`` counts timed rounds. ``singles`` are the single
    compilers that took part, by name.
    """

    eager_ms: float
    raftune_ms: float
    ratio: float
    ratio_high: float
    rounds: int
    singles: Mapping[str, Single] = dataclasses.field(default_factory=dict)

    @property
    def winner(self) -> str:
        """The side that is the fastest beyond doubt: ``eager`` was there before, and a single compiler must beat the plan."""
        faster = [name for name, single in self.singles.items() if single.ratio_high < 1.0]
        best = min(faster, key=lambda name: self.singles[name].ratio, default=None)
        if best is None or (self.pair_winner == PLAN and self.singles[best].over_plan_high >= 1.0):
            return self.pair_winner
        return best

    @property
    def pair_winner(self) -> str:
        """The winner where single compilers do not count."""
        return PLAN if self.ratio_high < 1.0 else EAGER

    @property
    def best_ms(self) -> float:
        """The winner's milliseconds."""
        return {EAGER: self.eager_ms, PLAN: self.raftune_ms}.get(self.winner) or self.singles[self.winner].ms

    def to_json(self) -> dict[str, Any]:
        singles = {name: dataclasses.asdict(single) for name, single in self.singles.items()}
        times = {name: getattr(self, name) for name in ("eager_ms", "raftune_ms", "ratio", "ratio_high", "rounds")}
        return times | {"singles": singles, "winner": self.winner}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> RaceResult:
        """Raises ``AttributeError``, ``KeyError``, ``TypeError`` or ``ValueError`` if ``value`` is not a race."""
        times = _positive(value, ("eager_ms", "raftune_ms", "ratio", "ratio_high"))
        names = tuple(field.name for field in dataclasses.fields(Single))
        singles = {str(n): Single(**_positive(single, names)) for n, single in value.get("singles", {}).items()}
        return RaceResult(**times, rounds=int(value["rounds"]), singles=singles)


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


def race(sides: Mapping[str, Callable[[], object]]) -> RaceResult:
    """Race ``eager``, ``raftune`` and any single compilers. All run on live state: restoring it is the caller's work."""
    return judge(interleave(sides))


def judge(times: Mapping[str, list[float]]) -> RaceResult:
    """The result of rounds timed by :func:`interleave`."""

    def over(name: str, other: str) -> tuple[float, float]:
        ratios = [b / a for a, b in zip(times[other], times[name], strict=True)]
        return statistics.median(ratios), median_upper_bound(ratios)

    return RaceResult(
        lower_quartile(times[EAGER]),
        lower_quartile(times[PLAN]),
        *over(PLAN, EAGER),
        rounds=len(times[EAGER]),
        singles={
            name: Single(lower_quartile(found), *over(name, EAGER), *over(name, PLAN))
            for name, found in times.items()
            if name not in (EAGER, PLAN)
        },
    )


def lower_quartile(values: list[float]) -> float:
    """Resists one-sided noise: something else on the machine can only make a step slower."""
    return statistics.quantiles(values, n=4)[0] if len(values) > 1 else values[0]


def _positive(value: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, float]:
    times = {name: float(value[name]) for name in names}
    if wrong := {name: time for name, time in times.items() if not 0.0 < time < math.inf}:
        raise ValueError(f"times and ratios must be positive, not {wrong}")
    return times


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
