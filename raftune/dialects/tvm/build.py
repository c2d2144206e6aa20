"""A scheduled function as machine code."""

from __future__ import annotations

from typing import Any

import tvm

from raftune.dialects.base import BuildError
from raftune.dialects.tvm.target import HostTarget
from raftune.dialects.tvm.team import join_team


def compile_module(module: Any, target: HostTarget) -> Any:
    """The compiled module, whose function is ``main``; raises :class:`BuildError` with LLVM's or TVM's message."""
    join_team(target.target)
    try:
        return tvm.compile(module, target=target.target)
    except Exception as error:  # TVM raises whatever its passes met: here it becomes a failed candidate
        raise BuildError(f"TVM could not compile the schedule: {type(error).__name__}: {str(error)[:500]}") from error
