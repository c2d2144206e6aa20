"""What a search hands back."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from raftune.workload import Candidate, Workload


class TaskStatus(enum.StrEnum):
    WON = "won"  # a candidate other than the default survived its rematch
    DEFAULT = "default"  # nothing beat the default by the margin
    FAILED = "failed"  # the default could not be measured; the task is left alone
    UNMEASURED = "unmeasured"  # the budget ended, or the machine was too noisy, before the default was measured


class Stop(enum.StrEnum):
    """Why a search ended."""

    FINISHED = "finished"  # every candidate measured and rematched
    BUDGET = "budget"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class TaskResult:
    """One task: times in microseconds, ``reason`` for a failed default."""

    workload: Workload
    weight: int
    status: TaskStatus
    default_us: float | None = None
    winner: Candidate | None = None
    best_us: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TuneResult:
    """All tasks in the order given, and what this run did.

    ``measured`` and ``rematches`` count this run's measurements, ``hits`` those that the log already held.
    """

    tasks: tuple[TaskResult, ...]
    measured: int
    rematches: int
    hits: int
    seconds: float
    stopped: Stop
    key: str
