"""A bound on the code that a schedule asks for: LLVM needs minutes for what a few unrolled loops can write out."""

from __future__ import annotations

from typing import Any

from tvm import s_tir, tirx

from raftune.dialects.base import BuildError

MAX_STATEMENTS = 1024
_AUTO_UNROLL = "pragma_auto_unroll_max_step"


def check_size(module: Any, lanes: int) -> None:
    """Raise :class:`BuildError` if the module's code, unrolled, is beyond :data:`MAX_STATEMENTS` vector statements."""
    size = sum(_size(function.body, lanes, 0) for function in module.functions.values())
    if size > MAX_STATEMENTS:
        raise BuildError(f"the schedule unrolls to {size} vector statements; at most {MAX_STATEMENTS} are compiled")


def _size(statement: Any, lanes: int, steps: int) -> int:
    """Statements of straight-line code; a serial loop counts once, or as often as ``steps`` allow it to be unrolled."""
    match statement:
        case tirx.For():
            steps = max(steps, int(statement.annotations.get(_AUTO_UNROLL, 0)))
            body = _size(statement.body, lanes, steps)
            extent = int(statement.extent)
            if statement.kind == tirx.ForKind.UNROLLED:
                return body * extent
            if statement.kind == tirx.ForKind.VECTORIZED:
                return body * -(-extent // lanes)
            return body * extent if body * extent <= steps else body
        case tirx.SeqStmt():
            return sum(_size(part, lanes, steps) for part in statement.seq)
        case tirx.IfThenElse():
            branches = (statement.then_case, statement.else_case)
            return sum(_size(branch, lanes, steps) for branch in branches if branch is not None)
        case s_tir.SBlockRealize():
            return _size(statement.block, lanes, steps)
        case s_tir.SBlock():
            init = 0 if statement.init is None else _size(statement.init, lanes, steps)
            return init + _size(statement.body, lanes, steps)
        case tirx.AttrStmt():
            return _size(statement.body, lanes, steps)
        case _:
            return 1
