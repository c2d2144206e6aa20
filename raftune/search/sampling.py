"""Further candidates from dialects whose spaces are too large to list (schedules): when to ask, and which to try."""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from raftune.dialects.base import Dialect
from raftune.measurement import Outcome, Status
from raftune.search.costs import DEADLY
from raftune.search.protocols import Measurer
from raftune.search.relatives import Relatives
from raftune.search.state import TaskState
from raftune.search.strategies import PROMISING, Belief, Strategy, expected_gain
from raftune.workload import Candidate

# Candidates drawn at a time, and how many are then tried: the best by the strategy's rating, and one that chance picks.
_DRAWN = 24
_TRIED = 6
# The population is drawn at random and around the fastest that were measured; then the best by rating are varied so often.
_PARENTS = 8
_GENERATIONS = 2
# Trials of a dialect in a task without an improvement of 1% after which it gets no more.
_PATIENCE = 24
_IMPROVEMENT = 0.99
# Between the seeds of generations: those of draws follow each other.
_STRIDE = 1_000_003
# Sampling pays where the dialect's best is within this factor of the best known, or the default takes at most so long:
# small kernels are cheap to try, and an unscheduled one says little about a scheduled one.
_NEAR = 2.0
_SMALL_US = 200.0
_SMALL_HOPE = Belief(math.log(1.3), 0.4)
_NEAR_STD = 0.3


class Sampler:
    """Decides from the results of a task, in their order, so that a later run with the same log decides the same."""

    def __init__(
        self,
        dialects: Sequence[Dialect],
        strategy: Strategy,
        relatives: Relatives,
        seed: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dialects = [d for d in dialects if type(d).sample is not Dialect.sample]
        self._strategy = strategy
        self._relatives = relatives
        self._seed = seed
        self._clock = clock
        self._draws: dict[tuple[str, str], int] = defaultdict(int)
        self._exhausted: set[tuple[str, str]] = set()

    def gains(self, task: TaskState) -> dict[str, float]:
        """Expected gain of sampling by dialect, for those where it promises something."""
        found = {}
        for dialect in self._dialects:
            key = (task.workload.digest, dialect.name)
            waiting = any(c.dialect == dialect.name for c in task.pool)
            if waiting or key in self._exhausted:
                continue
            gain = self._gain(task, dialect.name)
            if gain is not None and dialect.supports(task.workload):
                found[dialect.name] = gain
        return found

    def draw(self, measurer: Measurer, task: TaskState, dialect: str, *, limit: float, timeout: float) -> list[Candidate]:
        """Ask the dialect and put the most promising, at most ``limit``, into the task's pool; returns them.

        Without an answer within ``timeout`` seconds it is not asked for this task again.
        """
        key = (task.workload.digest, dialect)
        gain = self._gain(task, dialect) or 0.0
        seed = self._seed + _sampled(task, dialect) + self._draws[key]
        self._draws[key] += 1
        deadline = self._clock() + timeout

        def ask(parents: Sequence[Candidate], generation: int) -> list[Candidate]:
            left = deadline - self._clock()
            if left <= 0:
                return []
            return list(
                measurer.sample(task.workload, dialect, _DRAWN, seed + generation * _STRIDE, parents=parents, timeout=left)
            )

        # Variations first: where nothing tells the candidates apart, the order does.
        parents = _fastest(task, dialect) or self._relatives.best(task.workload, dialect, _PARENTS)
        drawn = dict.fromkeys([*(ask(parents, 0) if parents else ()), *ask((), 0)])
        rated = self._rated(task, drawn)
        for generation in range(1, _GENERATIONS + 1):
            if len({gain for gain, _ in rated}) < 2:
                break  # nothing is known that tells them apart
            drawn |= dict.fromkeys(ask([candidate for _, candidate in rated[:_PARENTS]], generation))
            rated = self._rated(task, drawn)
        chosen = []
        if rated:
            count = int(min(_TRIED, max(limit, 1), len(rated)))
            chosen = [candidate for _, candidate in rated[: count - 1]]
            chosen.append(random.Random(seed).choice([candidate for _, candidate in rated[count - 1 :]]))
        else:
            self._exhausted.add(key)
        task.offer(chosen, gain)
        return chosen

    def _rated(self, task: TaskState, drawn: Iterable[Candidate]) -> list[tuple[float, Candidate]]:
        """Those not known yet, the most promising first."""
        fresh = [c for c in drawn if c.digest not in task.results and c not in task.pool and not task.is_retry(c)]
        return sorted(zip(self._strategy.gains(task, fresh), fresh, strict=True), key=lambda pair: -pair[0])

    def _gain(self, task: TaskState, dialect: str) -> float | None:
        default_us = task.default_us
        outcomes = task.measured(dialect)
        times = [outcome.time_us for outcome in outcomes if outcome.status is Status.OK and outcome.time_us]
        # A space that kills or stalls workers costs more than it can bring.
        if not default_us or (outcomes and not times) or any(outcome.status in DEADLY for outcome in outcomes):
            return None
        # Each draw must have brought a result, else a machine too noisy to measure would be asked for ever.
        if self._draws[task.workload.digest, dialect] > _sampled(task, dialect):
            return None
        idle = _trials_since_improvement(task, dialect)
        if idle >= _PATIENCE:
            return None
        bar = task.best_ratio()
        small = default_us <= _SMALL_US
        hopes = [_SMALL_HOPE] if small else []
        if times and min(times) <= _NEAR * bar * default_us:
            hopes.append(Belief(math.log(min(times) / default_us), _NEAR_STD))
        if not hopes:
            return None
        gain = max(expected_gain(hope, bar) for hope in hopes) / (1 + idle / _TRIED)
        return gain if gain >= PROMISING else None


def _fastest(task: TaskState, dialect: str) -> list[Candidate]:
    """The fastest of the sampled candidates that were measured."""
    timed = [
        (outcome.time_us, candidate)
        for candidate, outcome in task.results.values()
        if candidate.dialect == dialect and candidate.digest not in task.enumerated and outcome.time_us is not None
    ]
    return [candidate for _, candidate in sorted(timed, key=lambda pair: pair[0])[:_PARENTS]]


def _sampled(task: TaskState, dialect: str) -> int:
    return sum(c.dialect == dialect and c.digest not in task.enumerated for c, _ in task.results.values())


def _trials_since_improvement(task: TaskState, dialect: str) -> int:
    """Sampled candidates of the dialect since its best time last fell by 1%."""
    best, idle = math.inf, 0
    for candidate, outcome in task.results.values():
        if candidate.dialect != dialect:
            continue
        idle += candidate.digest not in task.enumerated
        if _improves(outcome, best):
            best, idle = outcome.time_us or best, 0
    return idle


def _improves(outcome: Outcome, best: float) -> bool:
    return outcome.status is Status.OK and outcome.time_us is not None and outcome.time_us < _IMPROVEMENT * best
