"""What a search tells a live display, as it happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from raftune.measurement import Outcome, Rematch
from raftune.workload import Candidate, Workload


@dataclass(frozen=True, slots=True)
class SearchStarted:
    """``hits`` measurements are known already; ``seconds_left`` and ``trials_left`` are ``inf`` without a limit."""

    tasks: int
    candidates: int
    hits: int
    seconds_left: float
    trials_left: float


@dataclass(frozen=True, slots=True)
class TaskStarted:
    """The default of task number ``index`` (from 1) of ``total`` is about to be measured."""

    workload: Workload
    weight: int
    index: int
    total: int


@dataclass(frozen=True, slots=True)
class Measured:
    """One measurement was recorded. ``ratio`` is its time over the default's, if both are known."""

    workload: Workload
    weight: int
    candidate: Candidate
    outcome: Outcome
    is_default: bool
    ratio: float | None
    measured: int
    seconds_left: float


@dataclass(frozen=True, slots=True)
class Sampled:
    """A dialect was asked for further candidates of a task; ``count`` of them will be tried."""

    workload: Workload
    dialect: str
    count: int


@dataclass(frozen=True, slots=True)
class Rematched:
    """One interleaved comparison with the default was recorded."""

    workload: Workload
    candidate: Candidate
    rematch: Rematch
    won: bool


@dataclass(frozen=True, slots=True)
class Racing:
    """The whole step is about to be raced; the step by single compilers takes part if ready within ``patience_s`` seconds."""

    patience_s: float


Event = SearchStarted | TaskStarted | Measured | Sampled | Rematched | Racing
Progress = Callable[[Event], None]
