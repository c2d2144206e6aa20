"""What is known about one task: results so far, what is left to try, and who deserves a rematch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from raftune.measurement import Outcome, Rematch, Status
from raftune.workload import Candidate, Workload

# Candidates compared with the default at once, those within this factor of the fastest of them, and how many of a task may
# lose before no more are compared: those that follow are called only when the ones before lost.
_REMATCH_GROUP = 3
_REMATCH_REACH = 1.1
_REMATCH_LIMIT = 9

# What a candidate may save, as a share, that was only unlucky in being slower than the default.
_FAINT_HOPE = 0.002

# A measurement or rematch that found the machine too noisy is repeated once.
_ATTEMPTS = 2


class TaskState:
    """Mutable record of one task during a search.

    ``pool`` holds untried candidates, most promising dialect first; ``revision`` counts the changes. ``parts`` are the tasks
    of a region's members, if all of them are known.
    """

    def __init__(
        self,
        workload: Workload,
        weight: int,
        candidates: Iterable[Candidate],
        *,
        margin: float,
        outcomes: Mapping[str, tuple[Candidate, Outcome]],
        rematches: Mapping[str, tuple[Candidate, Rematch]],
    ) -> None:
        listed = list(candidates)
        self.workload = workload
        self.weight = weight
        self.default = listed[0]
        self.enumerated = frozenset(c.digest for c in listed)
        self.results = dict(outcomes)
        self.rematches = dict(rematches)
        self.pool = [c for c in listed if c.digest not in self.results]
        self.parts: list[TaskState] = []
        self.floor: dict[str, float] = {}
        self.revision = 0
        self._margin = margin
        self._noisy: dict[str, int] = {}
        self._noisy_rematches: dict[str, int] = {}

    @property
    def size(self) -> int:
        """Elements read and written: what is known of a workload's time before it is measured."""
        return sum(spec.numel for spec in (*self.workload.inputs, *self.workload.results))

    @property
    def default_outcome(self) -> Outcome | None:
        known = self.results.get(self.default.digest)
        return None if known is None else known[1]

    @property
    def default_us(self) -> float | None:
        outcome = self.default_outcome
        return None if outcome is None or outcome.status is not Status.OK else outcome.time_us

    @property
    def expected_us(self) -> float | None:
        """The default's time, measured or, of a region, what its members take one after the other."""
        if self.default_us is not None or not self.parts:
            return self.default_us
        times = [part.default_us for part in self.parts]
        return None if None in times else sum(time for time in times if time is not None)

    def unopened_ratio(self) -> float:
        """Of a region whose default was not measured: what its members take at their best, over their defaults."""
        times = [(part.default_us or 0.0, part.best_ratio()) for part in self.parts]
        total = sum(time for time, _ in times)
        return sum(time * ratio for time, ratio in times) / total if total else 0.0

    def add(self, candidate: Candidate, outcome: Outcome) -> None:
        """Take in a measurement. A noisy one goes to the end of the pool once, and is dropped the second time."""
        self.revision += 1
        self.pool = [c for c in self.pool if c != candidate]
        if outcome.status is not Status.NOISY:
            self.results[candidate.digest] = (candidate, outcome)
            return
        attempts = self._noisy[candidate.digest] = self._noisy.get(candidate.digest, 0) + 1
        if attempts < _ATTEMPTS:
            self.pool.append(candidate)

    def is_retry(self, candidate: Candidate) -> bool:
        return candidate.digest in self._noisy

    def offer(self, candidates: Sequence[Candidate], gain: float) -> None:
        """Add sampled candidates to the pool, to be rated at least at the ``gain`` that they were asked for."""
        self.revision += 1
        self.pool.extend(candidates)
        self.floor.update((candidate.digest, gain) for candidate in candidates)

    def drop_samples(self, dialect: str) -> None:
        """Try no more of what was sampled from a dialect."""
        self.revision += 1
        self.pool = [c for c in self.pool if c.dialect != dialect or c.digest in self.enumerated]

    def add_rematch(self, candidate: Candidate, rematch: Rematch) -> None:
        self.revision += 1
        self.rematches[candidate.digest] = (candidate, rematch)
        if rematch.status is Status.NOISY:
            self._noisy_rematches[candidate.digest] = self._noisy_rematches.get(candidate.digest, 0) + 1

    def won(self, candidate: Candidate) -> bool:
        """Whether the candidate's rematch beat the default by the margin."""
        known = self.rematches.get(candidate.digest)
        return known is not None and won(known[1], self._margin)

    def measured(self, dialect: str) -> list[Outcome]:
        """Final outcomes of one dialect, oldest first."""
        return [outcome for candidate, outcome in self.results.values() if candidate.dialect == dialect]

    def best_ratio(self) -> float:
        """The time over the default's that a further candidate must beat to be of use: at most ``1 - margin``."""
        default_us = self.default_us
        bar = 1 - self._margin
        for candidate, outcome in self._challengers():
            if default_us and outcome.time_us is not None and not self._is_out(candidate):
                known = self.rematches.get(candidate.digest)
                ratio = known[1].ratio if known is not None and known[1].ratio is not None else outcome.time_us / default_us
                bar = min(bar, ratio)
        return bar

    def saving_us(self) -> float:
        """Weighted time that the fastest of those waiting for a rematch would save in one step; never quite nothing."""
        times = [outcome.time_us or 0.0 for _, outcome in (self.results[c.digest] for c in self.to_rematch())]
        default_us = self.default_us
        if not times or default_us is None:
            return 0.0
        return self.weight * max(default_us - min(times), _FAINT_HOPE * default_us)

    def to_rematch(self) -> list[Candidate]:
        """The fastest few that may beat the default and were not compared with it yet, fastest first."""
        default = self.default_outcome
        if default is None or default.status is not Status.OK or default.time_us is None:
            return []
        reach = (1 - self._margin) * (default.high_us or default.time_us)
        near = [
            (outcome.time_us, candidate)
            for candidate, outcome in self._challengers()
            if outcome.time_us is not None and (outcome.low_us or outcome.time_us) <= reach and not self._is_out(candidate)
        ]
        if not near:
            return []
        near.sort(key=lambda pair: (pair[0], pair[1].digest))
        group = [c for time_us, c in near[:_REMATCH_GROUP] if time_us <= _REMATCH_REACH * near[0][0]]
        room = _REMATCH_LIMIT - sum(not self.won(c) for c, _ in self.rematches.values())
        return [c for c in group if not self.won(c)][: max(room, 0)]

    def _challengers(self) -> list[tuple[Candidate, Outcome]]:
        return [(c, o) for c, o in self.results.values() if o.status is Status.OK and c != self.default]

    def _is_out(self, candidate: Candidate) -> bool:
        """Whether the candidate lost its rematch, failed in it, or could not be compared for noise."""
        known = self.rematches.get(candidate.digest)
        if known is None:
            return False
        if known[1].status is Status.NOISY:
            return self._noisy_rematches[candidate.digest] >= _ATTEMPTS
        return not won(known[1], self._margin)


def won(rematch: Rematch, margin: float) -> bool:
    return rematch.status is Status.OK and rematch.ratio_high is not None and rematch.ratio_high <= 1 - margin
