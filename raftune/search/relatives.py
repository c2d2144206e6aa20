"""Where a search in a new workload starts: what was fastest for the workloads most like it, in the log of all earlier runs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, zip_longest

from raftune.dialects import registry
from raftune.log import TrainingRow
from raftune.measurement import Status
from raftune.workload import Candidate, Workload

# Of each relative so many are taken: the next relative's best says more than this one's third.
_OF_EACH = 2


class Relatives:
    """``rows`` gives the log's rows of all workloads with an operator's name."""

    def __init__(self, rows: Callable[[str], Iterable[TrainingRow]]) -> None:
        self._rows = rows

    def best(self, workload: Workload, dialect: str, count: int) -> list[Candidate]:
        """Up to ``count`` sampled candidates of ``dialect``, of the closest workloads with the same operators first."""
        timed: dict[Workload, list[tuple[float, Candidate]]] = defaultdict(list)
        for row in self._rows(workload.op):
            if row.candidate.dialect != dialect or row.outcome.status is not Status.OK or not row.outcome.time_us:
                continue
            if row.workload != workload and math.isfinite(_distance(row.workload, workload)):
                timed[row.workload].append((row.outcome.time_us, row.candidate))
        closest = sorted(timed, key=lambda other: (_distance(other, workload), other.digest))
        chosen = (candidate for other in closest for candidate in _fastest_sampled(other, timed[other]))
        return list(islice(dict.fromkeys(chosen), count))


def _fastest_sampled(workload: Workload, timed: list[tuple[float, Candidate]]) -> Iterator[Candidate]:
    listed = {candidate.digest for candidate in registry.candidates(workload)}
    sampled = (pair for pair in timed if pair[1].digest not in listed)
    return (candidate for _, candidate in sorted(sampled, key=lambda pair: pair[0])[:_OF_EACH])


def _distance(one: Workload, other: Workload) -> float:
    """How many times a size of one is doubled to become the other's, summed; infinite where ranks or dtypes differ."""
    total = 0.0
    for a, b in zip_longest((*one.inputs, *one.results), (*other.inputs, *other.results)):
        if a is None or b is None or a.dtype != b.dtype or len(a.shape) != len(b.shape):
            return math.inf
        total += sum(abs(math.log2(max(x, 1) / max(y, 1))) for x, y in zip(a.shape, b.shape, strict=True))
        total += a.stride != b.stride
    return total
