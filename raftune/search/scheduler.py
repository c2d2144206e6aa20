"""Which trial comes next: the one with the highest expected gain of the step per second spent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raftune.search.costs import Costs
from raftune.search.sampling import Sampler
from raftune.search.state import TaskState
from raftune.search.strategies import Strategy
from raftune.workload import Candidate

# A trial expected to save less than this share of its default's time does not hold up the task's rematch.
_PROMISING = 0.005
# A noisy measurement is repeated later: it counts for this much of a fresh one.
_RETRY = 0.25


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
        return self.task.weight * (self.task.default_us or 0.0) * self.gain / self.cost_s

    @property
    def promising(self) -> bool:
        return self.gain >= _PROMISING


class Scheduler:
    """Rates everything that could be done in all tasks whose default is measured."""

    def __init__(self, tasks: Sequence[TaskState], strategy: Strategy, sampler: Sampler, costs: Costs) -> None:
        self._tasks = tasks
        self._strategy = strategy
        self._sampler = sampler
        self._costs = costs

    def arms(self) -> list[Arm]:
        """In the order of tasks and of their pools, so that equal values go by dialect priority."""
        found: list[Arm] = []
        for task in self._tasks:
            if task.default_us is None:
                continue
            rated = zip(task.pool, self._strategy.gains(task, task.pool), strict=True) if task.pool else ()
            for candidate, gain in rated:
                expected = max(gain, task.floor.get(candidate.digest, 0.0)) * (_RETRY if task.is_retry(candidate) else 1.0)
                cost_s = self._costs.trial(task, candidate.dialect)
                found.append(Arm(task, candidate.dialect, candidate, expected, cost_s))
            for dialect, gain in self._sampler.gains(task).items():
                found.append(Arm(task, dialect, None, gain, self._costs.trial(task, dialect)))
        return found
