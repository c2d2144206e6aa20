"""Which trial comes next: the one with the highest expected gain of the step per second spent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raftune.search.costs import SAMPLING_S, Costs
from raftune.search.sampling import Sampler
from raftune.search.state import TaskState
from raftune.search.strategies import FIRST_LOOK, Strategy
from raftune.workload import Candidate

# A noisy measurement is repeated later: it counts for this much of a fresh one.
_RETRY = 0.25


_Rated = tuple[str, Candidate | None, float]


@dataclass(frozen=True, slots=True)
class Arm:
    """Something that could be done next: measure ``candidate``, or ask ``dialect`` for more if that is ``None``.

    ``gain`` is the expected share of the default's time saved beyond the best so far, ``cost_s`` the expected seconds.
    """

    task: TaskState
    dialect: str
    candidate: Candidate | None
    gain: float
    cost_s: float

    @property
    def value(self) -> float:
        """Expected microseconds of the step saved for each second spent."""
        return self.task.weight * (self.task.expected_us or 0.0) * self.gain / self.cost_s


class Scheduler:
    """Rates everything that could be done in all tasks whose default is measured, and opening the others by their default."""

    def __init__(self, tasks: Sequence[TaskState], strategy: Strategy, sampler: Sampler, costs: Costs) -> None:
        self._tasks = tasks
        self._strategy = strategy
        self._sampler = sampler
        self._costs = costs
        self._rated: dict[str, tuple[tuple[int, int], list[_Rated]]] = {}

    def arms(self) -> list[Arm]:
        """In the order of tasks and of their pools, so that equal values go by dialect priority."""
        age = self._strategy.refresh()
        found: list[Arm] = []
        for task in self._tasks:
            if task.default_us is None:
                if (opening := self._opening(task)) is not None:
                    found.append(opening)
                continue
            rated = self._ratings(task, age)
            costs = {dialect: self._costs.trial(task, dialect) for dialect in {dialect for dialect, _, _ in rated}}
            for dialect, candidate, gain in rated:
                found.append(Arm(task, dialect, candidate, gain, costs[dialect] + (SAMPLING_S if candidate is None else 0.0)))
        return found

    def exhausted(self) -> bool:
        """Whether nothing is left to try in any task."""
        return not any(
            self._opening(task) if task.default_us is None else (task.pool or self._sampler.gains(task)) for task in self._tasks
        )

    def _opening(self, task: TaskState) -> Arm | None:
        """Measuring a region's default, which saves nothing itself: it is rated with the first candidate that follows."""
        dialects = {candidate.dialect for candidate in task.pool if candidate != task.default}
        if task.expected_us is None or task.default not in task.pool or not dialects:
            return None
        cost_s = min(self._costs.trial(task, dialect) for dialect in dialects) + self._costs.trial(task, task.default.dialect)
        return Arm(task, task.default.dialect, task.default, FIRST_LOOK * task.unopened_ratio(), cost_s)

    def _ratings(self, task: TaskState, age: int) -> list[_Rated]:
        """Made again only if something changed: most steps change one task."""
        revision = (task.revision, age)
        known = self._rated.get(task.workload.digest)
        if known is None or known[0] != revision:
            known = self._rated[task.workload.digest] = (revision, self._rate(task))
        return known[1]

    def _rate(self, task: TaskState) -> list[_Rated]:
        found: list[_Rated] = []
        for candidate, gain in zip(task.pool, self._strategy.gains(task, task.pool), strict=True):
            expected = max(gain, task.floor.get(candidate.digest, 0.0)) * (_RETRY if task.is_retry(candidate) else 1.0)
            found.append((candidate.dialect, candidate, expected))
        found.extend((dialect, None, gain) for dialect, gain in self._sampler.gains(task).items())
        return found
