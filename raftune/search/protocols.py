"""What a search needs from whatever runs candidates: real workers, or a replay of recorded times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from raftune.measurement import Outcome, Rematch
from raftune.workload import Candidate, Workload


class Measurer(Protocol):
    """The part of :class:`raftune.measure.Measurer` that a search uses. Nothing raises for what a candidate does."""

    def measure(
        self,
        workload: Workload,
        candidate: Candidate,
        *,
        default: tuple[Candidate, float] | None = None,
        timeout: float | None = None,
    ) -> Outcome:
        """Run one candidate, in turns with ``default`` and on its scale if given (with its time in microseconds).

        ``timeout`` (seconds) may only shorten the policy's.
        """

    def rematch(self, workload: Workload, candidates: Sequence[Candidate], default: Candidate) -> Sequence[Rematch]:
        """Time the candidates and the default in turns; one result a candidate, in order."""

    def prepare(self, workload: Workload, candidates: Sequence[Candidate]) -> None:
        """Told of what will be measured soon; nothing has to come of it."""

    def sample(
        self,
        workload: Workload,
        dialect_name: str,
        count: int,
        seed: int,
        *,
        parents: Sequence[Candidate] = (),
        timeout: float | None = None,
    ) -> Sequence[Candidate]:
        """Up to ``count`` candidates from the dialect's larger space, near ``parents`` if given; none after ``timeout`` s."""
