"""Operator dialects: everything that knows a backend lives below this package and nowhere else."""

from raftune.dialects.base import BuildError, Dialect, Kernel, Unsupported
from raftune.dialects.registry import (
    UnknownDialect,
    build,
    candidates,
    default_candidate,
    describe,
    enabled,
    get,
    installed,
    with_dialects,
)

__all__ = [
    "BuildError",
    "Dialect",
    "Kernel",
    "UnknownDialect",
    "Unsupported",
    "build",
    "candidates",
    "default_candidate",
    "describe",
    "enabled",
    "get",
    "installed",
    "with_dialects",
]
