"""Running candidates: worker process, accuracy check, timing, contention guard, interleaved rematch."""

from raftune.measure.pool import Measurer
from raftune.measure.process import WorkerUnavailable

__all__ = ["Measurer", "WorkerUnavailable"]
