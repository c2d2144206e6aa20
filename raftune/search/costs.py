"""What a trial is expected to cost, in seconds, learned from what trials did cost."""

from __future__ import annotations

import math
from statistics import median

from raftune.measurement import Outcome, Rematch, Status
from raftune.search.state import TaskState
from raftune.workload import Candidate

# On top of the default, for a dialect never tried: nothing, so that it is tried as soon as the others.
_UNKNOWN_S = 0.0
_LEAST_S = 0.01
# Asking a dialect for samples: a schedule space has to be built. Not learned, as the log has no row for it.
SAMPLING_S = 3.0
DEADLY = (Status.CRASH, Status.TIMEOUT, Status.OOM)
"""Outcomes that cost the worker its life, and the search a new one."""
# The first measurement of a run pays for starting the workers: no default is taken to be this much dearer than usual.
_OUTLIER = 5.0
# A rematch over the candidate's own measurement without its build, until one was seen; the default is timed as often.
_REMATCH_FACTOR = 1.5


class Costs:
    """A candidate costs what its task's default did, plus what its dialect costs on top at least (a compiler's time)."""

    def __init__(self) -> None:
        self._defaults: dict[str, float] = {}
        self._extra: dict[str, float] = {}
        self._rematch_factors: list[float] = []
        self._usual_factor = _REMATCH_FACTOR
        self._usual_default = 0.0

    def observe(self, task: TaskState, candidate: Candidate, outcome: Outcome) -> None:
        if candidate == task.default:
            self._defaults[task.workload.digest] = outcome.cost_s
            self._usual_default = median(self._defaults.values())
        else:
            # What a dialect does once, before its first candidate, is not part of building; what died costs what it cost.
            extra = outcome.cost_s - self._base(task) if outcome.status in DEADLY else outcome.build_s
            # The least so far: the first workload of a dialect is the heaviest, and must not scare off from the light ones.
            known = self._extra.get(candidate.dialect, math.inf)
            self._extra[candidate.dialect] = min(known, max(extra, 0.0))

    def observe_rematch(self, task: TaskState, candidate: Candidate, rematch: Rematch) -> None:
        known = task.results.get(candidate.digest)
        if known is not None:
            self._rematch_factors.append(rematch.cost_s / _running(known[1]))
            self._usual_factor = median(self._rematch_factors)

    def trial(self, task: TaskState, dialect: str) -> float:
        return max(_LEAST_S, self._base(task) + self._extra.get(dialect, _UNKNOWN_S))

    def rematch(self, task: TaskState, candidates: list[Candidate]) -> float:
        """Seconds for all ``candidates`` together; the worker has their kernels built."""
        return self._usual_factor * sum(_running(task.results[c.digest][1]) for c in candidates)

    def _base(self, task: TaskState) -> float:
        usual = self._usual_default
        return min(self._defaults.get(task.workload.digest, usual), _OUTLIER * usual)


def _running(outcome: Outcome) -> float:
    """Seconds that a measurement took beside the build."""
    return max(_LEAST_S, outcome.cost_s - outcome.build_s)
