"""Which operators have a lowering: a table from an overload's name to its rule.

Rules are written against :class:`raftune.dialects.tvm.lowering.builder.Builder`, which is the only part of the lowering that
imports TVM; so the table can be read without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raftune.workload import Arg, Operator, Workload

Rule = Callable[..., Any]
"""``rule(builder, *args, **kwargs)``: arguments as in the ATen schema, tensors as TE tensors; returns a tensor or a tuple."""

Check = Callable[[Workload, Operator], bool]


@dataclass(frozen=True, slots=True)
class Lowering:
    """A rule, and whether it applies to a given call (decided from the specs, without TVM)."""

    rule: Rule
    check: Check


_RULES: dict[str, Lowering] = {}


def _always(workload: Workload, operator: Operator) -> bool:
    del workload, operator
    return True


def lowers(*ops: str, check: Check = _always) -> Callable[[Rule], Rule]:
    """Register the decorated rule for the named overloads."""

    def register(rule: Rule) -> Rule:
        for op in ops:
            if op in _RULES:
                raise ValueError(f"two lowerings for {op}")
            _RULES[op] = Lowering(rule, check)
        return rule

    return register


def find(op: str) -> Lowering | None:
    """The lowering of an overload, by its full name."""
    return _RULES.get(op)


def names() -> frozenset[str]:
    """Every overload that has a lowering."""
    return frozenset(_RULES)


def argument(operator: Operator, position: int, name: str, default: Arg = None) -> Arg:
    """An argument of a call, whether it was given by position or by name."""
    if position < len(operator.args):
        return operator.args[position]
    return dict(operator.kwargs).get(name, default)
