"""Running candidates: worker process, accuracy check, timing, contention guard, interleaved rematch."""

from raftune.measure.pool import Measurer, WorkerUnavailable

__all__ = ["Measurer", "WorkerUnavailable"]
