"""What a search may spend: parsing, the key under which spending adds up across runs, and the meter of one run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from raftune.device import Device
from raftune.measurement import Policy
from raftune.workload import Workload, canonical_json, digest_text

_NUMBER = r"\d+(?:\.\d+)?"
_DURATION = re.compile(rf"(?:({_NUMBER})h)?(?:({_NUMBER})m)?(?:({_NUMBER})s?)?", re.ASCII)

# A candidate is begun if it is expected to end within this share beyond the budget, and stopped at the harder bound: the
# budget is promised to hold within 10%.
_BEGIN_SLACK = 0.03
_STOP_SLACK = 0.07
# With less than this share left a later run does not begin: its workers take longer to start. A run ends with something left,
# as no result was recorded of the last it did.
_TOO_LITTLE = 0.05


class InvalidBudget(ValueError):
    """A budget that cannot be understood."""


def parse_duration(text: str) -> float:
    """Seconds of ``5m``, ``90s``, ``1h30m``, ``1.5h`` or plain seconds; raises :class:`InvalidBudget`."""
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None or not any(match.groups()):
        raise InvalidBudget(f"duration {text!r} is not understood; write it as 5m, 90s, 1h30m or a number of seconds")
    hours, minutes, seconds = (float(group or 0) for group in match.groups())
    return hours * 3600 + minutes * 60 + seconds


@dataclass(frozen=True, slots=True)
class Budget:
    """Wall-clock ``seconds`` and number of ``trials`` (measured candidates); ``None`` is no limit."""

    seconds: float | None = None
    trials: int | None = None

    def __post_init__(self) -> None:
        if self.seconds is not None and not (math.isfinite(self.seconds) and self.seconds >= 0):
            raise InvalidBudget(f"a budget of {self.seconds!r} seconds; it must be a number not below 0")
        if self.trials is not None and self.trials < 0:
            raise InvalidBudget(f"a budget of {self.trials} trials; it must not be below 0")

    @staticmethod
    def parse(seconds: str | None = None, trials: int | None = None) -> Budget:
        """A budget from a duration such as ``5m`` and a number of trials; raises :class:`InvalidBudget`."""
        return Budget(None if seconds is None else parse_duration(seconds), trials)


def budget_key(workloads: Iterable[Workload], device: Device, policy: Policy, dialects: Iterable[tuple[str, str]]) -> str:
    """What a budget belongs to: the tasks, the device, the policy, and the dialects with their versions.

    Neither the seed nor the budget is part of it, so that a run with more budget goes on from where the last one stopped.
    """
    parts = [sorted({w.digest for w in workloads}), device.digest, policy.digest, sorted(set(dialects))]
    return digest_text(canonical_json(parts))


class Meter:
    """Charges one run's spending against a budget from which earlier runs may have spent already.

    Time is charged at each recorded result, as everything since the previous one, so that ranking and sampling are paid for
    and the sum over a log's rows is the wall time. Decisions look at what was charged, not at the clock: a later run
    that finds the same rows in the log then decides the same.
    """

    def __init__(self, budget: Budget, spent_seconds: float, spent_trials: int, clock: Callable[[], float]) -> None:
        self.budget = budget
        self._clock = clock
        self._started = self._mark = clock()
        self._seconds = spent_seconds
        if budget.seconds is not None and spent_seconds >= (1 - _TOO_LITTLE) * budget.seconds:
            self._seconds = max(spent_seconds, budget.seconds)
        self._trials = spent_trials

    def charge(self, cost_s: float, *, trials: int = 0) -> float:
        """Charge the time since the last charge, or ``cost_s`` if that is more; returns the seconds charged."""
        now = self._clock()
        cost = max(cost_s, now - self._mark)
        self._mark = now
        self._seconds += cost
        self._trials += trials
        return cost

    @property
    def elapsed(self) -> float:
        """Seconds since this run began."""
        return self._clock() - self._started

    @property
    def seconds_left(self) -> float:
        return math.inf if self.budget.seconds is None else self.budget.seconds - self._seconds

    @property
    def trials_left(self) -> float:
        return math.inf if self.budget.trials is None else self.budget.trials - self._trials

    @property
    def open(self) -> bool:
        """Whether any time is left."""
        return self.seconds_left > 0 and self.stop_after() > 0

    def room(self, reserve: float = 0.0) -> float:
        """Seconds that something begun now may be expected to take; negative if nothing may be begun.

        ``reserve`` seconds are left for what comes after; the slack beyond the budget is then left as well.
        """
        return self._less(reserve, _BEGIN_SLACK) if self.open else -1.0

    def stop_after(self, reserve: float = 0.0) -> float:
        """Seconds from now after which whatever runs must be stopped, to leave ``reserve`` seconds."""
        return self._less(reserve, _STOP_SLACK) - (self._clock() - self._mark)

    def _less(self, reserve: float, slack: float) -> float:
        return self.seconds_left - reserve if reserve > 0 else self.seconds_left + slack * (self.budget.seconds or 0.0)
