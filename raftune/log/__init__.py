"""The tuning log: one SQLite file that remembers every measurement; winners are a query over it. See docs/log.md."""

from raftune.log.errors import LogError, LogWarning
from raftune.log.records import LoggedWinner, Spent, TrainingRow, Winner
from raftune.log.tuning_log import TuningLog

__all__ = ["LogError", "LogWarning", "LoggedWinner", "Spent", "TrainingRow", "TuningLog", "Winner"]
