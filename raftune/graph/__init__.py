"""Training graphs: capture, and the workloads in them."""

from raftune.graph.capture import capture
from raftune.graph.errors import BatchMismatch, CaptureError, StepMismatch, UnsupportedOptimizer
from raftune.graph.step import Step, StepResult
from raftune.graph.training_graph import Kind, Slot, TrainingGraph
from raftune.graph.workloads import (
    CONSTANT_META,
    Region,
    Task,
    fused_region,
    merge_tasks,
    region_of,
    tasks_of,
    workload_from_call,
    workload_of,
)

__all__ = [
    "CONSTANT_META",
    "BatchMismatch",
    "CaptureError",
    "Kind",
    "Region",
    "Slot",
    "Step",
    "StepMismatch",
    "StepResult",
    "Task",
    "TrainingGraph",
    "UnsupportedOptimizer",
    "capture",
    "fused_region",
    "merge_tasks",
    "region_of",
    "tasks_of",
    "workload_from_call",
    "workload_of",
]
