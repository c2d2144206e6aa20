"""Decides what to measure next, within a budget, and settles winners."""

from raftune.search.budget import Budget, InvalidBudget, parse_duration
from raftune.search.events import Event, Measured, Progress, Racing, Rematched, Sampled, SearchStarted, TaskStarted
from raftune.search.replay import Recording, simulate
from raftune.search.result import Stop, TaskResult, TaskStatus, TuneResult
from raftune.search.strategies import Exhaustive, ModelGuided, Random, Strategy
from raftune.search.tuner import tune

__all__ = [
    "Budget",
    "Event",
    "Exhaustive",
    "InvalidBudget",
    "Measured",
    "ModelGuided",
    "Progress",
    "Racing",
    "Random",
    "Recording",
    "Rematched",
    "Sampled",
    "SearchStarted",
    "Stop",
    "Strategy",
    "TaskResult",
    "TaskStarted",
    "TaskStatus",
    "TuneResult",
    "parse_duration",
    "simulate",
    "tune",
]
