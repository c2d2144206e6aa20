"""How much a candidate is expected to gain: exhaustive, random, and guided by the cost model.

A strategy only rates candidates; which task gets the next trial is the scheduler's decision, from these ratings.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from raftune.cost_model import NotEnoughData, Prediction
from raftune.log import TrainingRow
from raftune.measurement import Outcome, Status
from raftune.search.state import TaskState
from raftune.workload import Candidate, Workload, digest_text

# Below this expected share of the default's time a trial is of no consequence, though it may be made in the end.
PROMISING = 0.005


class Strategy(Protocol):
    """Rates untried candidates, and is told of each result."""

    def learn(self, task: TaskState, candidate: Candidate, outcome: Outcome) -> None:
        """Take in a final outcome (already part of ``task``)."""

    def refresh(self) -> int:
        """Make use of what was learned; returns a number that changes when it changed the ratings in all tasks."""

    def gains(self, task: TaskState, pool: Sequence[Candidate]) -> list[float]:
        """Expected share of the default's time that each candidate saves beyond the best so far, 0 to 1."""


class Exhaustive:
    """Tries everything, in the order in which dialects list their candidates; a task promises less with each trial."""

    def learn(self, task: TaskState, candidate: Candidate, outcome: Outcome) -> None:
        del task, candidate, outcome

    def refresh(self) -> int:
        return 0

    def gains(self, task: TaskState, pool: Sequence[Candidate]) -> list[float]:
        return [1 / (1 + len(task.results) + position) for position in range(len(pool))]


class Random:
    """Tries everything in an order drawn from ``seed``."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def learn(self, task: TaskState, candidate: Candidate, outcome: Outcome) -> None:
        del task, candidate, outcome

    def refresh(self) -> int:
        return 0

    def gains(self, task: TaskState, pool: Sequence[Candidate]) -> list[float]:
        drawn = (digest_text(f"{self._seed} {task.workload.digest} {candidate.digest}") for candidate in pool)
        return [int(digest[:8], 16) / 2**32 for digest in drawn]


class Belief(NamedTuple):
    """Normal distribution of the logarithm of a candidate's time over the default's, if it runs; ``ok``: how likely that is."""

    mean: float
    std: float
    ok: float = 1.0


class Model(Protocol):
    """The part of :class:`raftune.cost_model.CostModel` that a search uses."""

    def fit(self, rows: Iterable[TrainingRow]) -> object:
        """Learn anew; raises :class:`raftune.cost_model.NotEnoughData`."""

    def predict(self, workload: Workload, candidates: Sequence[Candidate]) -> Sequence[Prediction]:
        """One prediction a candidate, in order."""


# What is believed of a dialect before any of its results, and how many results weigh as much as that belief.
_PRIOR = Belief(0.1, 0.4)
_PRIOR_WEIGHT = 2.0
# The first candidate of a dialect in a task is tried with at least this much hope, and each further one with less: what one
# dialect can do there shows early, and its configs hope more together than they bring. No prediction is surer than the floor.
FIRST_LOOK = 0.4
_TIRED = 3.0
# What a dialect's later candidates brought over what they promised, with all tasks of one operator, scales what is promised
# next; promises that add up to this much (in shares of a default's time) are needed before it counts.
_CREDIT = 0.2
_FLOOR_STD = 0.05
# Results that the cost model needs before it is asked, and the share of new ones that makes it worth training again.
_MODEL_ROWS = 32
_REFIT_ROWS = 16
_REFIT_SHARE = 0.2


class ModelGuided:
    """Expected improvement from the cost model's predictions; while there are few results, from each dialect's record.

    ``rows`` gives the training rows of the log. The model is trained at the start, and again when enough rows were added;
    without a model every belief comes from the records.
    """

    def __init__(self, model: Model | None, rows: Callable[[], Iterable[TrainingRow]]) -> None:
        self._model = model
        self._rows = rows
        self._trained = 0
        self._new = _REFIT_ROWS
        self._ready = False
        self._age = 0
        self._predicted: dict[tuple[str, str], Belief] = {}
        self._record: dict[tuple[str, ...], list[float]] = defaultdict(list)
        self._tried: dict[str, list[bool]] = defaultdict(list)
        self._promised: dict[tuple[str, str], tuple[float, float]] = {}
        self._kept: dict[tuple[str, str], list[float]] = defaultdict(lambda: [_CREDIT, _CREDIT])

    def learn(self, task: TaskState, candidate: Candidate, outcome: Outcome) -> None:
        self._new += 1
        self._age += 1
        self._tried[candidate.dialect].append(outcome.status is Status.OK)
        if promise := self._promised.pop((task.workload.digest, candidate.digest), None):
            gain, bar = promise
            kept = self._kept[candidate.dialect, task.workload.op]
            kept[0] += gain
            if outcome.time_us and task.default_us:
                kept[1] += max(bar - outcome.time_us / task.default_us, 0.0)
        if outcome.time_us and task.default_us and candidate != task.default:
            ratio = math.log(outcome.time_us / task.default_us)
            self._record[candidate.dialect,].append(ratio)
            self._record[candidate.dialect, task.workload.op].append(ratio)

    def gains(self, task: TaskState, pool: Sequence[Candidate]) -> list[float]:
        bar = task.best_ratio()
        tried = Counter(candidate.dialect for candidate, _ in task.results.values() if candidate != task.default)
        gains = []
        for candidate, belief in zip(pool, self._beliefs(task, pool), strict=True):
            count = tried[candidate.dialect]
            gain = belief.ok * expected_gain(belief, bar)
            if count:
                self._promised[task.workload.digest, candidate.digest] = (gain, bar)
                promised, kept = self._kept[candidate.dialect, task.workload.op]
                gains.append(gain * min(1.0, kept / promised) / (1 + count / _TIRED))
            else:
                gains.append(max(gain, belief.ok * FIRST_LOOK * bar))
        return gains

    def refresh(self) -> int:
        self._refit()
        return self._age

    def _refit(self) -> None:
        if self._model is None or self._new < max(_REFIT_ROWS, _REFIT_SHARE * self._trained):
            return
        rows = list(self._rows())
        self._new, self._trained = 0, len(rows)
        if len(rows) < _MODEL_ROWS:
            return
        try:
            self._model.fit(rows)
        except NotEnoughData:  # many rows, but few of them timed: the records serve until there are more
            return
        self._predicted.clear()
        self._ready = True
        self._age += 1

    def _beliefs(self, task: TaskState, pool: Sequence[Candidate]) -> list[Belief]:
        if self._model is None or not self._ready:
            return [self._prior(candidate.dialect, task.workload.op) for candidate in pool]
        workload = task.workload.digest
        unknown = [c for c in pool if (workload, c.digest) not in self._predicted]
        if unknown:
            for candidate, prediction in zip(unknown, self._model.predict(task.workload, unknown), strict=True):
                belief = Belief(prediction.log_ratio, max(prediction.std, _FLOOR_STD), prediction.ok)
                self._predicted[workload, candidate.digest] = belief
        return [self._predicted[workload, c.digest] for c in pool]

    def _prior(self, dialect: str, op: str) -> Belief:
        """The dialect's record with this operator, drawn towards its record with all, and that towards the prior."""
        belief = _update(_update(_PRIOR, self._record.get((dialect,), ())), self._record.get((dialect, op), ()))
        tried = self._tried.get(dialect, ())
        return belief._replace(ok=(sum(tried) + 2) / (len(tried) + 2))


def _update(prior: Belief, values: Sequence[float]) -> Belief:
    """Mean and deviation of ``values`` together with ``_PRIOR_WEIGHT`` values spread like ``prior``."""
    weight = _PRIOR_WEIGHT + len(values)
    mean = (_PRIOR_WEIGHT * prior.mean + math.fsum(values)) / weight
    spread = _PRIOR_WEIGHT * (prior.std**2 + (prior.mean - mean) ** 2) + math.fsum((v - mean) ** 2 for v in values)
    return Belief(mean, math.sqrt(spread / weight))


def expected_gain(belief: Belief, bar: float) -> float:
    """Expected improvement of a log-normal ratio below ``bar``: E[max(bar - ratio, 0)] (Black and Scholes' put).

    That it may not run at all is left to the caller.
    """
    mean, std, _ = belief
    if std <= 0:
        return max(bar - math.exp(mean), 0.0)
    depth = (math.log(bar) - mean) / std
    # Beyond this the expectation is that the candidate loses, whatever floating point makes of exp(mean).
    if depth < -30:
        return 0.0
    return max(bar * _phi(depth) - math.exp(mean + std * std / 2) * _phi(depth - std), 0.0)


def _phi(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))
