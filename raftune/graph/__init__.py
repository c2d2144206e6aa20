"""Training graphs: capture, and the workloads in them."""

from raftune.graph.capture import capture
from raftune.graph.errors import CaptureError, StepMismatch, UnsupportedOptimizer
from raftune.graph.step import Step, StepResult
from raftune.graph.training_graph import CONSTANT_META, Kind, Slot, TrainingGraph

__all__ = [
    "CONSTANT_META",
    "CaptureError",
    "Kind",
    "Slot",
    "Step",
    "StepMismatch",
    "StepResult",
    "TrainingGraph",
    "UnsupportedOptimizer",
    "capture",
]
