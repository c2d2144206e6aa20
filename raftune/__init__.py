"""raftune: measure, learn and remember the fastest kernel dialect for every operator of a training graph."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raftune.compiler.selector import Choice, Selector
    from raftune.compiler.step import CompiledStep, compile_step
    from raftune.dialects import Dialect, with_dialects
    from raftune.graph import capture, tasks_of, workload_from_call, workload_of
    from raftune.log import TuningLog
    from raftune.models import Target
    from raftune.search import Budget, tune

# Loaded on first use: the command line's help, and a worker process, need none of them.
_EXPORTS = {
    "Budget": "raftune.search",
    "Choice": "raftune.compiler.selector",
    "CompiledStep": "raftune.compiler.step",
    "Dialect": "raftune.dialects",
    "Selector": "raftune.compiler.selector",
    "Target": "raftune.models",
    "TuningLog": "raftune.log",
    "capture": "raftune.graph",
    "compile_step": "raftune.compiler.step",
    "tasks_of": "raftune.graph",
    "tune": "raftune.search",
    "with_dialects": "raftune.dialects",
    "workload_from_call": "raftune.graph",
    "workload_of": "raftune.graph",
}

__all__ = [
    "Budget",
    "Choice",
    "CompiledStep",
    "Dialect",
    "Selector",
    "Target",
    "TuningLog",
    "capture",
    "compile_step",
    "tasks_of",
    "tune",
    "with_dialects",
    "workload_from_call",
    "workload_of",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'raftune' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)
